"""Ranks that are killed or raise."""

import os
import signal
import time

from cases import LIMIT_S, PIPE, case, fail, say, started


@case(2)
def killed(control, rank):
    with started(control).phase("forward"):
        if rank == 1:
            time.sleep(1)
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(LIMIT_S)


@case(2)
def first_rank_killed(control, rank):
    with started(control).phase("forward"):
        if rank == 0:  # and the store with it
            time.sleep(1)
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(LIMIT_S)


@case(2)
def first_rank_killed_at_once(control, rank):
    """Before the other one's watch has looked for the first time."""
    read, write = PIPE
    with started(control).phase("forward"):
        if rank == 0:
            os.read(read, 1)
            os.kill(os.getpid(), signal.SIGKILL)
        os.write(write, b"x")
        time.sleep(LIMIT_S)


@case(2)
def killed_in_collective(control, rank):
    import torch
    import torch.distributed as dist

    watchdog = started(control)
    with watchdog.phase("backward"):
        watchdog.note("block.3 all_reduce")
        if rank == 1:
            time.sleep(1)
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            dist.all_reduce(torch.ones(4))
        except RuntimeError as error:
            watchdog.failed(error)
            raise


@case(2)
def caught_on_one_rank(control, rank):
    import torch
    import torch.distributed as dist

    watchdog = started(control)
    if rank == 1:
        try:
            with watchdog.phase("forward"):
                watchdog.note("encoder.block.2")
                fail("sizes do not match")
        except ValueError as error:
            watchdog.failed(error)
            time.sleep(8)  # alive, its connections open, and of no use to the others
    with watchdog.phase("step"):
        dist.all_reduce(torch.ones(4))


@case(2)
def uncaught_on_one_rank(control, rank):
    with started(control).phase("forward"):
        if rank == 1:
            time.sleep(1)
            fail("nobody catches this")
        time.sleep(LIMIT_S)


@case(2)
def uncaught_in_a_noted_collective(control, rank):
    watchdog = started(control)
    watchdog.stepped(3)
    with watchdog.phase("backward"):
        watchdog.note("transformer.h.2 all_gather")
        if rank == 1:
            watchdog.note("transformer.h.3 reduce_scatter")
            time.sleep(1)
            fail("out of memory")
        time.sleep(LIMIT_S)


@case(2)
def uncaught_on_both(control, rank):
    with started(control).phase("forward"):
        time.sleep(rank)
        fail("the same on both")


@case(2)
def caught_on_both(control, rank):
    watchdog = started(control)
    for number in range(2):
        try:
            with watchdog.phase("forward"):
                time.sleep(rank * 0.8)
                fail(f"number {number}")
        except ValueError as error:
            watchdog.failed(error)
            watchdog.failed(error)
    time.sleep(3.5)
    say("went on", control.share("after", rank))
