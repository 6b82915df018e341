"""Ranks that are fresh processes, for what a reused process cannot show: kill -9, exit codes, start-up, signals."""

from __future__ import annotations

import base64
import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from polyscale.testing import shipping

_RUN_FUNCTION = (
    "import base64, sys; from polyscale.testing import shipping; "
    "function, args = shipping.loads(base64.b64decode(sys.argv[1])); function(*args)"
)


@dataclass(frozen=True)
class Outcome:
    """How one fresh rank ended.

    Attributes:
        rank: its rank.
        returncode: exit code; -N for signal N.
        stdout: what it wrote to stdout.
        stderr: what it wrote to stderr.
        timed_out: it was killed because the time was over.
        seconds: from the start of the first rank to its end.
    """

    rank: int
    returncode: int
    stdout: str
    stderr: str
    timed_out: bool
    seconds: float


def ranks_once(
    n: int,
    target: str | Path | Callable[..., Any],
    *args: Any,
    timeout: float = 60.0,
    env: Mapping[str, str] | None = None,
    cwd: str | Path | None = None,
) -> list[Outcome]:
    """Run ``target`` in ``n`` new processes with torchrun's environment variables, and wait until all have ended.

    Nothing joins them: ``target`` makes its process group itself (``polyscale.initialize`` does).

    Args:
        n: number of processes.
        target: path of a script, or a function at the top level of a file.
        args: arguments: strings of the command line for a script, pickled objects for a function.
        timeout: seconds for all; what still runs then is killed.
        env: environment variables to add.
        cwd: working directory.
    """
    command = _command(target, args)
    port = str(_free_port())
    started = time.monotonic()
    running = [_Process(rank, command, _environment(rank, n, port, env), cwd) for rank in range(n)]
    try:
        while any(process.alive() for process in running) and time.monotonic() < started + timeout:
            time.sleep(0.02)
    finally:
        ended = [process.alive() for process in running]
        for process in running:
            process.kill()
    return [process.outcome(timed_out, started) for process, timed_out in zip(running, ended, strict=True)]


def _command(target: str | Path | Callable[..., Any], args: tuple[Any, ...]) -> list[str]:
    if not callable(target):
        return [sys.executable, str(target), *map(str, args)]
    shipping.check_shippable(target)
    payload = base64.b64encode(shipping.dumps((target, args))).decode()
    return [sys.executable, "-c", _RUN_FUNCTION, payload]


def _environment(rank: int, n: int, port: str, env: Mapping[str, str] | None) -> dict[str, str]:
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "")
    launch = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(n),
        "LOCAL_WORLD_SIZE": str(n),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "OMP_NUM_THREADS": "1",
    }
    gloo = {"GLOO_SOCKET_IFNAME": loopback} if loopback else {}
    return dict(os.environ) | launch | gloo | dict(env or {})


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class _Process:
    """One process, its output in unlinked files."""

    def __init__(self, rank: int, command: list[str], env: dict[str, str], cwd: str | Path | None) -> None:
        self.rank = rank
        self.ended = 0.0
        self.files: list[IO[bytes]] = [tempfile.TemporaryFile() for _ in range(2)]  # noqa: SIM115 (closed in outcome)
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=self.files[0],
            stderr=self.files[1],
            env=env,
            cwd=cwd,
            start_new_session=True,
        )

    def alive(self) -> bool:
        if self.process.poll() is None:
            return True
        self.ended = self.ended or time.monotonic()
        return False

    def kill(self) -> None:
        """Kill it if it runs, and what it started and left behind."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def outcome(self, timed_out: bool, started: float) -> Outcome:
        texts = []
        for file in self.files:
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
            file.close()
        seconds = (self.ended or time.monotonic()) - started
        return Outcome(self.rank, self.process.returncode, texts[0], texts[1], timed_out, seconds)
