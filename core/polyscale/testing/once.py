"""Ranks that are fresh processes, for what a reused process cannot show: kill -9, exit codes, start-up, signals.

Notable: a script is run by an interpreter of its own. A function is called in a fork of the process that has imported
torch (see ``zygote``), which saves seconds and ends as a program does: excepthook, exit handlers, exit code.
"""

from __future__ import annotations

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
from polyscale.testing.pool import zygote
from polyscale.testing.rank_process import Program, loopback

Target = str | Path | Callable[..., Any]
Folder = str | Path | None


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
    target: Target,
    *args: Any,
    timeout: float = 60.0,
    env: Mapping[str, str] | None = None,
    cwd: Folder = None,
) -> list[Outcome]:
    """Run ``target`` in ``n`` new processes with torchrun's environment variables, and wait until all have ended.

    Nothing joins them: ``target`` makes its process group itself (``polyscale.initialize`` does).

    Args:
        n: number of processes.
        target: path of a script, or a function at the top level of a file.
        args: arguments: strings of the command line for a script, pickled objects for a function.
        timeout: seconds for all; what still runs then is killed.
        env: environment variables to add; a function's process has imported torch and the plugins before they are set.
        cwd: working directory.
    """
    if callable(target):
        shipping.check_shippable(target)
        zygote()
    port = str(_free_port())
    started = time.monotonic()
    running = [_Process(rank, target, args, _environment(rank, n, port, env), cwd) for rank in range(n)]
    try:
        while any(process.alive() for process in running) and time.monotonic() < started + timeout:
            time.sleep(0.02)
    finally:
        ended = [process.alive() for process in running]
        for process in running:
            process.kill()
    return [process.outcome(timed_out, started) for process, timed_out in zip(running, ended, strict=True)]


def _environment(rank: int, n: int, port: str, env: Mapping[str, str] | None) -> dict[str, str]:
    launch = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(n),
        "LOCAL_WORLD_SIZE": str(n),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "OMP_NUM_THREADS": "1",
    }
    return dict(os.environ) | launch | loopback() | dict(env or {})


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class _Process:
    """One process, its output in unlinked files."""

    def __init__(self, rank: int, target: Target, args: tuple[Any, ...], env: dict[str, str], cwd: Folder) -> None:
        self.rank = rank
        self.ended = 0.0
        self.files: list[IO[bytes]] = [tempfile.TemporaryFile() for _ in range(2)]  # noqa: SIM115 (closed in outcome)
        output, errors = self.files
        self.process: subprocess.Popen[bytes] | Program
        if callable(target):
            payload = shipping.dumps((target, args))
            self.process = zygote().program(payload, output, errors, env, str(cwd or Path.cwd()))
        else:
            self.process = subprocess.Popen(
                [sys.executable, str(target), *map(str, args)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
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
        return Outcome(self.rank, self.process.wait(), texts[0], texts[1], timed_out, seconds)
