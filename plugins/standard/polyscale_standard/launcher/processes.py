"""Following rank processes: which ended first and how, and ending all that is left.

Notable: one thread per rank sleeps in ``waitid(WNOWAIT)``, which leaves the process to the agent to reap, so the order
of deaths is known more finely than the agent's polling shows it: of a rank that fails and those that fail because of
it, the first names the cause. A rank that its watchdog ended says by its code that it is not the cause, even where it
ended first: the one that failed may take longer to come down. Each rank leads its own session and process group (the
agent starts it so): what it started itself ends with the group.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from polyscale.control.watchdog import EXIT_CODE
from polyscale_standard.launcher import guard


@dataclass(frozen=True)
class Ended:
    """How a rank ended: its exit code, or minus the number of the signal that ended it."""

    rank: int
    code: int

    @property
    def failed(self) -> bool:
        """Whether it did not end well."""
        return self.code != 0

    @property
    def secondary(self) -> bool:
        """Whether its watchdog ended it because of another rank."""
        return self.code == EXIT_CODE

    @property
    def exit_code(self) -> int:
        """As a shell tells it: signal s is 128 + s."""
        return self.code if self.code >= 0 else 128 - self.code

    def __str__(self) -> str:
        if self.code >= 0:
            return f"Rank {self.rank} exited with code {self.code}"
        try:
            name = signal.Signals(-self.code).name
        except ValueError:
            name = f"signal {-self.code}"
        return f"Rank {self.rank} was ended by {name}"


class RankProcesses:
    """The processes of one launch; a guard ends them where this process is killed."""

    def __init__(self) -> None:
        self._guard: subprocess.Popen[str] | None = None
        self._pids: dict[int, int] = {}
        self._ended: list[Ended] = []
        self._unknown = 0
        self._counted: int | None = None
        self._lock = threading.Lock()

    def started(self, pids: Mapping[int, int]) -> None:
        """Follow local rank -> process id from now on."""
        self._pids.update(pids)
        self._watch_over(pids.values())
        for rank, pid in pids.items():
            threading.Thread(target=self._follow, args=(rank, pid), name=f"rank-{rank}", daemon=True).start()

    @property
    def any_started(self) -> bool:
        """Whether there are processes to follow."""
        return bool(self._pids)

    @property
    def all_ended(self) -> bool:
        """Whether every rank has ended."""
        with self._lock:
            return len(self._ended) + self._unknown >= len(self._pids)

    def cause(self) -> Ended | None:
        """The rank that failed first, but for those that their watchdog ended, if another failed too; or None."""
        with self._lock:
            failed = [ended for ended in self._ended[: self._counted] if ended.failed]
        return min(failed, key=lambda ended: ended.secondary, default=None)

    def left_before(self, failure: Ended) -> list[int]:
        """The ranks that had ended well before ``failure``."""
        with self._lock:
            before = self._ended[: self._ended.index(failure)] if failure in self._ended else []
        return sorted(ended.rank for ended in before if not ended.failed)

    def blame_no_more(self) -> None:
        """From now on the launcher ends ranks: how they end says nothing about the cause."""
        with self._lock:
            if self._counted is None:
                self._counted = len(self._ended)

    def send(self, number: int) -> None:
        """Send a signal to the process group of every rank; groups that are gone are skipped."""
        for pid in self._pids.values():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, number)

    def close(self) -> None:
        """Nothing is left to guard."""
        if self._guard is not None:
            with contextlib.suppress(OSError):
                self._guard.communicate("done\n")

    def _watch_over(self, groups: Iterable[int]) -> None:
        command = [sys.executable, "-I", "-S", guard.__file__]
        # In a session of its own: what is sent to the launcher's process group does not reach it.
        self._guard = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, start_new_session=True
        )
        assert self._guard.stdin is not None
        self._guard.stdin.write("".join(f"{group}\n" for group in groups))
        self._guard.stdin.flush()

    def _follow(self, rank: int, pid: int) -> None:
        try:
            info = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        except ChildProcessError:
            info = None
        with self._lock:
            if info is None:  # reaped before this thread looked: only the agent knows the code
                self._unknown += 1
            else:
                code = info.si_status if info.si_code == os.CLD_EXITED else -info.si_status
                self._ended.append(Ended(rank, code))
