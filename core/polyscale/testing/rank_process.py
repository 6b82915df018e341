"""A rank, and the process that forks ranks, as the test run sees them.

Notable: a rank's stdout and stderr go to an unlinked file, so a killed test run leaves nothing behind.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from multiprocessing import connection as mp
from typing import IO, Any

from polyscale.testing import framing, shipping
from polyscale.testing.failures import PackedError, RankFailure

GRACE_S = 5.0
_NOT_INHERITED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def loopback() -> dict[str, str]:
    """The variable that keeps gloo on the loopback interface, where it needs no host name that resolves."""
    name = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "")
    return {"GLOO_SOCKET_IFNAME": name} if name else {}


@dataclass
class RankProcess:
    """One rank as its parent sees it."""

    rank: int
    pid: int
    connection: mp.Connection
    output: IO[bytes]
    zygote: ZygoteProcess
    waiting: bool = False
    answer: tuple[Any, ...] = field(default_factory=tuple)
    exit_code: int | None = None

    @property
    def failed(self) -> bool:
        """Whether it ended, or answered with an error."""
        return self.exit_code is not None or (not self.waiting and self.answer[:1] == ("error",))

    def send(self, *request: Any) -> None:
        """Send a request; one to a rank that has ended is dropped."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.connection.send_bytes(pickle.dumps(request))

    def begin(self, *request: Any) -> None:
        """Send a request that will be answered; what the rank writes from now on belongs to it."""
        os.ftruncate(self.output.fileno(), 0)
        os.lseek(self.output.fileno(), 0, os.SEEK_SET)
        self.waiting, self.answer = True, ()
        self.send(*request)

    def receive(self) -> None:
        """Take the answer, which is there; a rank that closed its connection instead has ended."""
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
        """Have the rank write the stacks of its threads."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGUSR1)

    def failure(self) -> RankFailure:
        """Tell what the rank did and wrote."""
        output = os.pread(self.output.fileno(), os.fstat(self.output.fileno()).st_size, 0).decode(errors="replace")
        if self.exit_code is not None:
            return RankFailure(self.rank, "exit", exit_code=self.exit_code, output=output)
        if self.waiting:
            return RankFailure(self.rank, "timeout", output=output)
        if self.answer[:1] != ("error",):  # or it has been asked nothing yet
            return RankFailure(self.rank, "ok", output=output)
        packed = self.answer[2]
        exception = packed.unpack() if isinstance(packed, PackedError) else packed
        return RankFailure(self.rank, "exception", exception=exception, traceback=self.answer[1], output=output)

    def kill(self) -> None:
        """Kill the rank and what it started."""
        from polyscale.testing.zygote import kill_group

        if self.exit_code is None:
            kill_group(self.pid)

    def reap(self) -> None:
        """Wait for the end of a rank that is ending, and take its exit code; all are killed with what forked them."""
        if self.exit_code is None:
            self.exit_code = self.zygote.request("reap", self.pid) if self.zygote.lives else -signal.SIGKILL
            self.connection.close()


@dataclass
class Program:
    """A forked program, with the names of ``subprocess.Popen``."""

    pid: int
    zygote: ZygoteProcess
    returncode: int | None = None

    def poll(self) -> int | None:
        """Its exit code; None while it runs."""
        if self.returncode is None:
            self.returncode = self.zygote.request("poll", self.pid)
        return self.returncode

    def wait(self) -> int:
        """Wait for its end, and kill it when that does not come."""
        if self.returncode is None:
            self.returncode = int(self.zygote.request("reap", self.pid))
        return self.returncode


class ZygoteProcess:
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

    def fork(self, rank: int, world: int, *, group: dict[str, Any], env: dict[str, str]) -> RankProcess:
        """Fork a rank, with ``env`` beside the environment of the process, for groups made as ``group`` says."""
        ours, theirs = mp.Pipe()
        output = tempfile.TemporaryFile(prefix="polyscale-rank")  # noqa: SIM115 (lives as long as the rank)
        launch = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
        settings = {
            "rank": rank,
            "world": world,
            **group,
            "path": list(sys.path),
            "env": env | {name: str(value) for name, value in launch.items()},
        }
        message = shipping.dumps(("fork", settings))
        framing.send(self.control, message, [theirs.fileno(), output.fileno()])
        pid = self._receive()
        theirs.close()
        return RankProcess(rank, pid, ours, output, self)

    def program(self, payload: bytes, output: IO[bytes], errors: IO[bytes], env: dict[str, str], cwd: str) -> Program:
        """Fork a process that calls a shipped (function, arguments) and ends as a program of its own does."""
        settings = {"env": env, "cwd": cwd, "path": list(sys.path)}
        message = shipping.dumps(("program", settings, payload))
        framing.send(self.control, message, [output.fileno(), errors.fileno()])
        return Program(self._receive(), self)

    def request(self, *message: Any) -> Any:
        """Send a message and return the answer."""
        framing.send(self.control, shipping.dumps(message))
        return self._receive()

    @property
    def lives(self) -> bool:
        """Whether it can be asked."""
        return self.process.poll() is None

    def close(self) -> None:
        """End the process, and with it every rank."""
        atexit.unregister(self.close)
        self.control.close()
        try:
            self.process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _receive(self) -> Any:
        message, _ = framing.receive(self.control)
        if message is None:
            raise RuntimeError(f"the process that starts ranks ended with exit code {self.process.wait()}")
        return shipping.loads(message)
