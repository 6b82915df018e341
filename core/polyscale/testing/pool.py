"""A pool of rank processes that run many cases, seen from the test that uses it.

Notable: a rank's stdout and stderr go to an unlinked file, so a killed test run leaves nothing behind. After a
failure the whole pool is killed and a new one forked for the next case, which costs milliseconds (see ``zygote``).
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing import connection as mp
from typing import IO, Any

from polyscale.testing import shipping
from polyscale.testing.failures import PackedError, RankFailure, RanksFailed

CASE_TIMEOUT_S = 60.0
GROUP_TIMEOUT_S = 30.0
GRACE_S = 5.0
START_TIMEOUT_S = 120.0
DUMP_S = 0.3
_NOT_INHERITED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class PoolReport:
    """What a pool cost so far: seconds to start, cases run, times it was replaced after a failure."""

    world: int
    start_seconds: float
    cases: int
    replaced: int


def ranks(n: int, *, backend: str = "gloo") -> RankPool:
    """Return the pool of ``n`` ranks of this process; its processes start with its first case."""
    return _pool(n, backend)


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
        backend: backend of the default process group, as for ``torch.distributed.init_process_group``.
        group_timeout: seconds until a collective gives up.
    """

    def __init__(self, n: int, *, backend: str = "gloo", group_timeout: float = GROUP_TIMEOUT_S) -> None:
        if n < 1:
            raise ValueError(f"a pool needs at least 1 rank, not {n}")
        self.world = n
        self.backend = backend
        self.group_timeout = group_timeout
        self.cases = 0
        self.replaced = 0
        self.start_seconds = 0.0
        self._ranks: list[_RankProcess] = []
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
            self._collect(time.monotonic() + timeout, function.__qualname__)
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
        zygote = _zygote()
        env = _rank_environment()
        self._ranks = [
            zygote.fork(rank, self.world, backend=self.backend, group_timeout=self.group_timeout, env=env)
            for rank in range(self.world)
        ]
        first = self._ranks[0]
        first.begin("listen")
        if not first.wait(time.monotonic() + START_TIMEOUT_S) or first.answer[0] != "port":
            raise RanksFailed("starting the pool", tuple(self._failures()))
        for process in self._ranks:
            process.send("connect", first.answer[1])
        if not self.start_seconds:
            self.start_seconds = time.monotonic() - started

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
            raise RanksFailed(f"{case}()", tuple(self._failures()))

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


@dataclass
class _RankProcess:
    """One rank as its parent sees it."""

    rank: int
    pid: int
    connection: mp.Connection
    output: IO[bytes]
    zygote: _Zygote
    waiting: bool = False
    answer: tuple[Any, ...] = field(default_factory=tuple)
    exit_code: int | None = None

    @property
    def failed(self) -> bool:
        return self.exit_code is not None or (not self.waiting and self.answer[:1] == ("error",))

    def send(self, *request: Any) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.connection.send_bytes(pickle.dumps(request))

    def begin(self, *request: Any) -> None:
        """Send a request that will be answered; what the rank writes from now on belongs to it."""
        os.ftruncate(self.output.fileno(), 0)
        os.lseek(self.output.fileno(), 0, os.SEEK_SET)
        self.waiting, self.answer = True, ()
        self.send(*request)

    def receive(self) -> None:
        self.waiting = False
        try:
            self.answer = shipping.loads(self.connection.recv_bytes())
        except (EOFError, ConnectionResetError):
            self.reap()
        except Exception as error:
            self.answer = ("error", f"the answer of rank {self.rank} cannot be read: {error!r}", None)

    def wait(self, deadline: float) -> bool:
        """Wait for the answer; False when the rank ended, or did not answer in time."""
        if mp.wait([self.connection], max(0.0, deadline - time.monotonic())):
            self.receive()
        return not self.waiting and self.exit_code is None

    def dump_threads(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGUSR1)

    def failure(self) -> RankFailure:
        output = os.pread(self.output.fileno(), os.fstat(self.output.fileno()).st_size, 0).decode(errors="replace")
        if self.exit_code is not None:
            return RankFailure(self.rank, "exit", exit_code=self.exit_code, output=output)
        if self.waiting:
            return RankFailure(self.rank, "timeout", output=output)
        if self.answer[0] != "error":
            return RankFailure(self.rank, "ok", output=output)
        packed = self.answer[2]
        exception = packed.unpack() if isinstance(packed, PackedError) else packed
        return RankFailure(self.rank, "exception", exception=exception, traceback=self.answer[1], output=output)

    def kill(self) -> None:
        from polyscale.testing.zygote import kill_group

        if self.exit_code is None:
            kill_group(self.pid)

    def reap(self) -> None:
        if self.exit_code is None:
            self.exit_code = self.zygote.request("reap", self.pid)
            self.connection.close()


class _Zygote:
    """The parent's end of the process that forks ranks."""

    def __init__(self) -> None:
        self.control, theirs = socket.socketpair()
        environment = {name: value for name, value in os.environ.items() if name not in _NOT_INHERITED}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "polyscale.testing.zygote", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
            env=environment | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
        )
        theirs.close()
        self._receive()
        atexit.register(self.close)

    def fork(self, rank: int, world: int, *, backend: str, group_timeout: float, env: dict[str, str]) -> _RankProcess:
        ours, theirs = mp.Pipe()
        output = tempfile.TemporaryFile(prefix="polyscale-rank")  # noqa: SIM115 (lives as long as the rank)
        launch = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
        settings = {
            "rank": rank,
            "world": world,
            "backend": backend,
            "group_timeout": group_timeout,
            "path": list(sys.path),
            "env": env | {name: str(value) for name, value in launch.items()},
        }
        message = shipping.dumps(("fork", settings))
        socket.send_fds(self.control, [message], [theirs.fileno(), output.fileno()])
        pid = self._receive()
        theirs.close()
        return _RankProcess(rank, pid, ours, output, self)

    def request(self, *message: Any) -> Any:
        self.control.sendall(shipping.dumps(message))
        return self._receive()

    def close(self) -> None:
        atexit.unregister(self.close)
        self.control.close()
        try:
            self.process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _receive(self) -> Any:
        data = self.control.recv(1 << 16)
        if not data:
            raise RuntimeError(f"the process that starts ranks ended with exit code {self.process.wait()}")
        return shipping.loads(data)


@functools.cache
def _zygote() -> _Zygote:
    return _Zygote()


@functools.cache
def _pool(n: int, backend: str) -> RankPool:
    return RankPool(n, backend=backend)


@functools.cache
def _pools() -> list[RankPool]:
    return []


def _rank_environment() -> dict[str, str]:
    """Environment of every rank: loopback for gloo (no name to resolve), and waits that end before a case does."""
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "")
    env = {"POLYSCALE_TIMEOUT": "20"}
    return env | ({"GLOO_SOCKET_IFNAME": loopback} if loopback else {})
