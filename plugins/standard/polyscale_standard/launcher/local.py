"""Starting, following and ending the ranks of this host.

Notable: the exit code is that of the rank that failed first, or 128 + s when signal s ended it or us. A signal is
passed on to the ranks. After a failure they are first left alone for ``LINGER_S``, because those who wait for the dead
rank find out and say where they were; for ``LINGER_SECONDARY_S`` while only ranks have failed whose watchdog ended them
because of another one, which is then still on its way down. Then they are asked to end. What outlasts that by
``GRACE_S`` is killed, and whole process groups are, so nothing that ranks started is left either.
"""

from __future__ import annotations

import contextlib
import logging
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from polyscale.control.watchdog import EXIT_CODE
from polyscale.errors import PolyscaleError
from polyscale.interfaces.launcher import LaunchRequest
from polyscale_standard import env
from polyscale_standard.launcher.environment import contract, free_port, rank_defaults
from polyscale_standard.launcher.processes import Ended, RankProcesses
from polyscale_standard.launcher.streams import RankStreams

logger = logging.getLogger("polyscale")
LINGER_S = 2.0
LINGER_SECONDARY_S = 8.0
GRACE_S = 3.0
GRACE_AFTER_SIGNAL_S = 5.0
_TICK_S = 0.05
_SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP")


class LocalLauncher:
    """Launcher ``local``."""

    name = "local"

    def is_available(self) -> bool:
        """Return whether it can start ranks here; never raises."""
        return not self.why_unavailable()

    def why_unavailable(self) -> str:
        """Say what is missing; "" when available."""
        if sys.platform == "win32":
            return "it needs process groups and pipes of POSIX; on Windows start ranks with torchrun"
        return ""

    def plan(self, request: LaunchRequest) -> list[str]:
        """One command line per rank; each can be pasted into a shell of its own."""
        command = resolve(request)
        inherited = env.inherited()
        shared = {**rank_defaults(request.nproc, {**inherited, **request.env}), **request.env}
        port = free_port()
        return [
            " ".join(
                [
                    f"{key}={shlex.quote(value)}"
                    for key, value in {**contract(rank, request.nproc, port), **shared}.items()
                ]
                + [shlex.join(command)]
            )
            for rank in range(request.nproc)
        ]

    def run(self, request: LaunchRequest) -> int:
        """Start, follow and end all ranks.

        Returns:
            0; the exit code of the first rank that failed (128 + s where signal s ended it); or 128 + s when this
            process got signal s (130 for SIGINT).

        Raises:
            PolyscaleError: the script, program or log folder cannot be used.
        """
        command = resolve(request)
        shared = {**rank_defaults(request.nproc, {**env.inherited(), **request.env}), **request.env}
        with _signals() as received, _streams(request) as streams:
            processes = RankProcesses()
            from polyscale_standard.launcher.elastic import AgentThread

            end = _End(processes, received)
            agent = AgentThread(
                command,
                nproc=request.nproc,
                env=shared,
                streams=streams,
                on_start=processes.started,
                hold=end.holds,
                cancelled=lambda: bool(received),
            )
            try:
                agent.start()
                while not agent.wait(_TICK_S):
                    end.follow()
            finally:
                end.sweep()
                processes.close()
        if received:
            return 128 + received[0]
        return _report(processes.cause() or agent.failure(), processes, request.nproc)


def resolve(request: LaunchRequest) -> list[str]:
    """Program and arguments of one rank: a Python script runs under this interpreter.

    Raises:
        PolyscaleError: no command, no such script or program, or fewer than one rank.
    """
    if request.nproc < 1:
        raise PolyscaleError(f"nproc {request.nproc}", why="there must be at least one rank", fix="Give 1 or more")
    if not request.command:
        raise PolyscaleError("An empty command", fix="Give a script and its arguments")
    program, *args = request.command
    if program.endswith(".py") or (Path(program).is_file() and shutil.which(program) is None):
        if not Path(program).is_file():
            raise PolyscaleError(f"Script {program}", why=_missing(program), fix="Check the path")
        return [sys.executable, program, *args]
    if shutil.which(program) is None:
        raise PolyscaleError(
            f"Program {program}", why="it is neither a file nor a program on PATH", fix="Check the name"
        )
    return [program, *args]


def _line(variables: Mapping[str, str], command: Sequence[str]) -> str:
    return " ".join([f"{name}={shlex.quote(value)}" for name, value in variables.items()] + [shlex.join(command)])


def _missing(program: str) -> str:
    path = Path(program)
    if path.is_dir():
        return "it is a folder"
    return f"there is no such file in {path.absolute().parent}"


@contextlib.contextmanager
def _streams(request: LaunchRequest) -> Iterator[RankStreams]:
    streams = RankStreams(request.nproc, consoles=(sys.stdout, sys.stderr), log_dir=request.log_dir)
    try:
        yield streams
    finally:
        streams.close()


@contextlib.contextmanager
def _signals() -> Iterator[list[int]]:
    """Collect the signals that ask us to end, in order, instead of being ended by them."""
    received: list[int] = []

    def handler(number: int, frame: FrameType | None) -> None:
        received.append(number)

    before: dict[int, Any] = {}
    for name in _SIGNALS:
        with contextlib.suppress(AttributeError, ValueError):  # not on this system; not in the main thread
            number = getattr(signal, name)
            before[number] = signal.signal(number, handler)
    try:
        yield received
    finally:
        for number, previous in before.items():
            signal.signal(number, previous if previous is not None else signal.SIG_DFL)


class _End:
    """Brings a launch to its end after a failure or a signal."""

    def __init__(self, processes: RankProcesses, received: Sequence[int]) -> None:
        self._processes = processes
        self._received = received
        self._forwarded = 0
        self._since: float | None = None

    def holds(self) -> bool:
        """Whether ranks are still given the time to end by themselves after a signal or a failure."""
        if self._processes.all_ended:
            return False
        if self._received:
            return self._elapsed() < GRACE_AFTER_SIGNAL_S
        if self._processes.cause() is None:
            return False
        lingers = self._elapsed() < self._linger()
        if not lingers:
            self._processes.blame_no_more()
        return lingers

    def follow(self) -> None:
        """Pass signals on; once a rank has failed or a signal came, kill what outlasts the grace."""
        if not self._processes.any_started:
            return
        for number in self._received[self._forwarded :]:
            self._processes.send(number)
            self._forwarded += 1
        if self._since is None and (self._received or self._processes.cause()):
            self._since = time.monotonic()
        patience = GRACE_AFTER_SIGNAL_S if self._received else self._linger() + GRACE_S
        if self._elapsed() >= patience or len(self._received) > 2:
            self._processes.blame_no_more()
            self._processes.send(signal.SIGKILL)

    def sweep(self) -> None:
        """Kill what ranks have left behind, unless all ended well."""
        if self._received or self._processes.cause() or not self._processes.all_ended:
            self._processes.send(signal.SIGKILL)

    def _linger(self) -> float:
        cause = self._processes.cause()
        return LINGER_SECONDARY_S if cause is not None and cause.secondary else LINGER_S

    def _elapsed(self) -> float:
        return 0.0 if self._since is None else time.monotonic() - self._since


def _report(failure: Ended | None, processes: RankProcesses, nproc: int) -> int:
    if failure is None:
        return 0
    logger.error("%s", _words(failure, processes.left_before(failure), nproc))
    return failure.exit_code


def _words(failure: Ended, left: Sequence[int], nproc: int) -> str:
    """Say which rank failed, and which one is more likely behind it.

    A rank that waits for one that has ended well fails with the watchdog's code, or with that of an exception.
    """
    if nproc == 1:
        return str(failure)
    if left and failure.code in (1, EXIT_CODE):
        ranks = ", ".join(map(str, left[:8])) + (f" and {len(left) - 8} more" if len(left) > 8 else "")
        who = f"Rank {ranks}" if len(left) == 1 else f"Ranks {ranks}"
        return (
            f"{who} ended with code 0 while others still ran; rank {failure.rank}, the first to fail, exited with code "
            f"{failure.code}, probably because it waited for that; the others were ended"
        )
    if failure.secondary:
        return f"{failure} because of another rank: see what the ranks printed; the others were ended"
    text = f"{failure}, the first to fail; the others were ended"
    if failure.code == -signal.SIGABRT:
        text += ". Ranks that make different collective calls at the same time may end so: see what it printed"
    return text
