"""Ranks that end, or do something else, in order or out of it."""

import atexit
import ctypes
import dataclasses
import os
import signal
import sys
import threading
import time

from cases import LIMIT_S, case, say, started


@case(2)
def calm(control, rank):
    from polyscale.control.watchdog import Watchdog

    first, second = Watchdog(control), Watchdog(control)
    hook = sys.excepthook
    first.start(), second.start(), second.start()
    say("threads", watch_threads())
    if os.fork() == 0:  # as a worker of a data loader; what runs at its exit must not say that the rank left
        atexit._run_exitfuncs()
        os._exit(0)
    os.wait()
    for step in range(3):
        with first.phase("forward"):
            first.note("block.0")
            control.share("loss", step)
        first.stepped(step)
    time.sleep(1.2)
    first.stop()
    say("threads after one stop", watch_threads())
    second.stop(), second.stop()
    say("threads after both", watch_threads())
    say("hook restored", sys.excepthook is hook)
    second.start()
    control.share("end", None)


@case(2)
def ended_early(control, rank):
    watchdog = started(control, left=2.0)
    watchdog.stepped(7)
    with watchdog.phase("backward"):
        if rank == 1:
            sys.exit(0)
        time.sleep(LIMIT_S)


@case(2)
def ended_early_while_the_other_computes(control, rank):
    watchdog = started(control, left=2.0)
    with watchdog.phase("forward"):
        if rank == 1:
            sys.exit(0)
        end = time.monotonic() + 5
        while time.monotonic() < end:
            sum(range(100_000))


@case(2)
def first_rank_ends_first(control, rank):
    started(control)
    if rank == 1:
        time.sleep(5)  # the store is gone by then


@case(2)
def ends_the_group_itself(control, rank):
    import torch.distributed as dist

    with started(control).phase("forward"):
        dist.destroy_process_group()
        if rank == 1:
            os._exit(0)  # without a word
        time.sleep(4)


@case(2)
def saves_long_after_the_other_ended(control, rank):
    with started(control, left=1.0).phase("save of 'a'"):
        if rank == 0:
            time.sleep(4)


@case(2, POLYSCALE_HEARTBEAT="1")
def holds_the_lock(control, rank):
    started(control)
    if rank == 1:
        ctypes.PyDLL(None).usleep(5_000_000)  # PyDLL keeps the interpreter's lock
    control.share("end", rank)


@case(2, POLYSCALE_HEARTBEAT="6")
def first_rank_is_stopped_for_a_while(control, rank):
    """And the store with it, so that no rank hears of another one."""
    pretend_a_host(rank)
    with started(control).phase("forward"):
        pids = control.share("pid", os.getpid())
        time.sleep(3)
        if rank == 1:
            os.kill(pids[0], signal.SIGSTOP)
            time.sleep(13)
            os.kill(pids[0], signal.SIGCONT)
        control.share("end", rank)
        time.sleep(4)


@case(2, POLYSCALE_HEARTBEAT="2")
def silent_host(control, rank):
    pretend_a_host(rank)
    with started(control).phase("forward"):
        time.sleep(1)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(LIMIT_S)


def watch_threads():
    return sum(thread.name == "polyscale-watchdog" for thread in threading.enumerate())


def pretend_a_host(rank):
    """Each rank on a host of its own."""
    from polyscale.control import processes

    identity = dataclasses.replace(processes.this_process(), host=f"host{rank}", place=f"host{rank}")
    processes.this_process = lambda: identity
