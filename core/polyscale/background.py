"""Daemon threads that work in native code, and the end of the process.

Notable: while the interpreter ends, CPython ends every daemon thread that wants to run Python again by unwinding its
stack, and the native frames on it (a binding that had let go of the interpreter's lock) do not survive that: the
process would die by SIGABRT, whatever its exit code was to be. So such a thread says when it works (:func:`working`),
waits in short steps in Python (:func:`wait_until`) and stops when the process ends. A thread that only waits for a
queue is no danger.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

GRACE_S = 5.0
SHORTEST_S, LONGEST_S = 20e-6, 1e-3


class ProcessEnding(RuntimeError):
    """What a thread waits for will not be waited for any longer, since the process ends."""


@contextmanager
def working() -> Iterator[None]:
    """What a daemon thread does inside may be in native code; the end of the process waits for it, for a short time."""
    found = _background()
    found.begin()
    try:
        yield
    finally:
        found.finish()


def wait_until(done: Callable[[], bool]) -> None:
    """Wait for something that native code does; looks every 20 microseconds at first and every millisecond at last.

    Raises:
        ProcessEnding: the process ends.
    """
    ending, pause = _background().ending, SHORTEST_S
    while not done():
        if ending.is_set():
            raise ProcessEnding("the process is ending")
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_S)


def is_ending() -> bool:
    """Whether the process ends, and does not wait for long any more."""
    return _background().ending.is_set()


def at_process_end(function: Callable[[], None]) -> None:
    """Call ``function`` when this process ends, those given last first; also in children of ``multiprocessing``."""
    atexit.register(function)
    if "multiprocessing" in sys.modules:
        from multiprocessing import parent_process, util

        if parent_process() is not None:
            util.Finalize(None, function, exitpriority=100)  # such children skip ``atexit``


def prepare() -> None:
    """Have what is under way stopped after what is given to :func:`at_process_end` from now on."""
    _background()


class _Background:
    def __init__(self) -> None:
        self.pid = os.getpid()
        self.ending = threading.Event()
        self._count = 0
        self._none = threading.Condition()

    def begin(self) -> None:
        with self._none:
            self._count += 1

    def finish(self) -> None:
        with self._none:
            self._count -= 1
            self._none.notify_all()

    def end(self) -> None:
        if self.pid != os.getpid():  # a forked child has none of these threads
            return
        self.ending.set()
        with self._none:
            self._none.wait_for(lambda: self._count == 0, timeout=GRACE_S)


def _background() -> _Background:
    if _of_process().pid != os.getpid():
        _of_process.cache_clear()
    return _of_process()


@cache
def _of_process() -> _Background:
    made = _Background()
    at_process_end(made.end)
    return made
