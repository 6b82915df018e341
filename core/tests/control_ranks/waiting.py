"""Ranks that wait for one another."""

import datetime
import time

from cases import case, started


@case(2)
def different_calls(control, rank):
    import torch
    import torch.distributed as dist

    watchdog = started(control, stuck=2.0)
    watchdog.stepped(5)
    with watchdog.phase("backward" if rank else "forward"):
        watchdog.note(f"layer.{rank} all_gather")
        dist.recv(torch.ones(4), src=1 - rank)


@case(2)
def different_calls_until_the_timeout(control, rank):
    import torch
    import torch.distributed as dist

    group = dist.new_group(timeout=datetime.timedelta(seconds=3))
    watchdog = started(control)
    try:
        with watchdog.phase("backward" if rank else "forward"):
            watchdog.note(f"layer.{rank} all_gather")
            dist.recv(torch.ones(4), src=1 - rank, group=group)
    except RuntimeError as error:
        watchdog.failed(error)
        explained = watchdog.explain(error)
        raise explained from error


@case(3)
def waits_for_a_rank_that_does_something_of_its_own(control, rank):
    import torch
    import torch.distributed as dist

    watchdog = started(control, stuck=1.0)
    with watchdog.phase(("forward", "backward", "step")[rank]):
        if rank == 2:
            time.sleep(6)  # as for a disk, an answer over the network, or a person at a debugger
        else:
            dist.recv(torch.ones(4), src=rank + 1)
        if rank > 0:
            dist.send(torch.ones(4), dst=rank - 1)
