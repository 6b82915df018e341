"""A pool of rank processes that run many cases, seen from the test that uses it.

Notable: after a failure the whole pool is killed and a new one forked for the next case, which costs milliseconds
(see ``zygote``).
"""

from __future__ import annotations

import atexit
import functools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing import connection as mp
from typing import Any

from polyscale.testing import shipping
from polyscale.testing.failures import RankFailure, RanksFailed
from polyscale.testing.rank_process import GRACE_S, RankProcess, ZygoteProcess, loopback

CASE_TIMEOUT_S = 60.0
GROUP_TIMEOUT_S = 30.0
START_TIMEOUT_S = 120.0
ACTIVATION_TIMEOUT_S = 400.0
DUMP_S = 0.3


@dataclass(frozen=True)
class PoolReport:
    """What a pool cost so far: seconds to start, cases run, times it was replaced after a failure."""

    world: int
    start_seconds: float
    cases: int
    replaced: int


def ranks(n: int, *, backend: str = "", accelerator: str = "cpu") -> RankPool:
    """Return the pool of ``n`` ranks of this process; its processes start with its first case.

    Args:
        n: number of ranks.
        backend: of the default process group, or the communication plugin it is of; "": the accelerator's (gloo for
            cpu).
        accelerator: name of the accelerator plugin that each rank activates, once. Ranks of another accelerator are
            other processes, because a device that was registered with torch stays.
    """
    return _pool(n, backend, accelerator)


def close_pools() -> None:
    """End every process that :func:`ranks` started. Also happens at exit, and when this process dies."""
    for pool in _pools():
        pool.close()
    if _zygote.cache_info().currsize:
        _zygote().close()
        _zygote.cache_clear()


def pool_reports() -> list[PoolReport]:
    """Tell what each pool that has run a case cost."""
    return [pool.report() for pool in _pools() if pool.cases]


class RankPool:
    """``n`` processes that run functions together, each call in a fresh default process group.

    Args:
        n: number of ranks.
        backend: backend of the default process group, as for ``torch.distributed.init_process_group``, or a
            communication plugin's name; "": the accelerator's.
        accelerator: name of the accelerator plugin that each rank activates before its first group.
        group_timeout: seconds until a collective gives up.
    """

    def __init__(
        self, n: int, *, backend: str = "", accelerator: str = "cpu", group_timeout: float = GROUP_TIMEOUT_S
    ) -> None:
        if n < 1:
            raise ValueError(f"a pool needs at least 1 rank, not {n}")
        self.world = n
        self.backend = backend
        self.accelerator = accelerator
        self.group_timeout = group_timeout
        self.cases = 0
        self.replaced = 0
        self.start_seconds = 0.0
        self._ranks: list[RankProcess] = []
        _pools().append(self)

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        timeout: float = CASE_TIMEOUT_S,
        env: Mapping[str, str] | None = None,
        seed: int = 0,
        **kwargs: Any,
    ) -> list[Any]:
        """Call ``function(*args, **kwargs)`` on every rank and return the results by rank.

        Args:
            function: a function at the top level of a file (a test module will do).
            args: its positional arguments, pickled; functions and classes of test modules too.
            timeout: seconds for the case as a whole.
            env: environment variables of the ranks during the case.
            seed: seeds Python's, numpy's and torch's generators on every rank before the call.
            kwargs: its keyword arguments.

        Raises:
            RanksFailed: a rank raised, ended, or did not finish in time; tells what each rank did and wrote.
            TypeError: ``function`` cannot be found by another process.
        """
        shipping.check_shippable(function)
        payload = shipping.dumps((function, args, kwargs))
        try:
            if not self._ranks:
                self._start()
            self.cases += 1
            for process in self._ranks:
                process.begin("case", self.cases, dict(env or {}), seed, payload)
            self._collect(time.monotonic() + timeout, f"{function.__qualname__}()")
            results = [process.answer[1] for process in self._ranks]
            self._clean()
        except BaseException:
            self._discard()
            raise
        return results

    def report(self) -> PoolReport:
        """Tell what this pool cost so far."""
        return PoolReport(self.world, self.start_seconds, self.cases, self.replaced)

    def close(self) -> None:
        """End the processes; the next ``run`` would start new ones."""
        ranks, self._ranks = self._ranks, []
        for process in ranks:
            process.kill()
        for process in ranks:
            process.reap()
            process.output.close()

    def _start(self) -> None:
        started = time.monotonic()
        source = zygote()
        env = _rank_environment()
        group = {"backend": self.backend, "accelerator": self.accelerator, "group_timeout": self.group_timeout}
        self._ranks = [source.fork(rank, self.world, group=group, env=env) for rank in range(self.world)]
        first = self._ranks[0]
        first.begin("listen")
        if not first.wait(time.monotonic() + START_TIMEOUT_S) or first.answer[0] != "port":
            raise RanksFailed("starting the pool", tuple(self._failures()))
        for process in self._ranks:
            process.send("connect", first.answer[1])
        self._activate()
        if not self.start_seconds:
            self.start_seconds = time.monotonic() - started

    def _activate(self) -> None:
        """Let every rank activate its accelerator, which may build a kernel module first."""
        if self.accelerator == "cpu":
            return
        for process in self._ranks:
            process.begin("activate")
        self._collect(time.monotonic() + ACTIVATION_TIMEOUT_S, "activating the accelerator")

    def _collect(self, deadline: float, case: str) -> None:
        """Wait for an answer of every rank; after the first failure the others get ``GRACE_S`` more."""
        while waiting := [process for process in self._ranks if process.waiting]:
            ready = mp.wait([process.connection for process in waiting], max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for process in waiting:
                if process.connection in ready:
                    process.receive()
            if any(process.failed for process in self._ranks):
                deadline = min(deadline, time.monotonic() + GRACE_S)
        if any(process.waiting or process.failed for process in self._ranks):
            raise RanksFailed(case, tuple(self._failures()))

    def _failures(self) -> list[RankFailure]:
        stuck = [process for process in self._ranks if process.waiting]
        for process in stuck:
            process.dump_threads()
        if stuck:
            time.sleep(DUMP_S)
        return [process.failure() for process in self._ranks]

    def _clean(self) -> None:
        for process in self._ranks:
            process.begin("clean")
        deadline = time.monotonic() + self.group_timeout
        if not all(process.wait(deadline) and process.answer[1] is None for process in self._ranks):
            self._discard()

    def _discard(self) -> None:
        self.replaced += bool(self._ranks)
        self.close()


def zygote() -> ZygoteProcess:
    """The process that forks ranks; starts at the first call, which takes seconds, and again after it was killed."""
    if not _zygote().lives:
        _zygote.cache_clear()
    return _zygote()


@functools.cache
def _zygote() -> ZygoteProcess:
    started = ZygoteProcess()
    atexit.register(close_pools)  # before the zygote's own end, which leaves the files of the ranks open
    return started


@functools.cache
def _pool(n: int, backend: str, accelerator: str) -> RankPool:
    return RankPool(n, backend=backend, accelerator=accelerator)


@functools.cache
def _pools() -> list[RankPool]:
    return []


def _rank_environment() -> dict[str, str]:
    """Environment of every rank: loopback for gloo (no name to resolve), and waits that end before a case does."""
    return {"POLYSCALE_TIMEOUT": "20", **loopback()}
