"""Who a process is, and whether it is still there; with the standard library alone.

Notable: a process is told from a later one of the same number by its start time, and a process of another pid
namespace (a container) counts as one of another host, because its number means nothing here. Signal 0 tells nothing
on Windows (there it ends the process), so each process is a host of its own there and is watched by its heartbeat.
"""

from __future__ import annotations

import os
import socket
import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Identity:
    """One process.

    Attributes:
        host: host name, for people.
        place: equal for processes that can see one another's numbers.
        pid: process number.
        started: start time in clock ticks since boot, or "" where it is not known.
    """

    host: str
    place: str
    pid: int
    started: str

    def __str__(self) -> str:
        return f"pid {self.pid} on {self.host}"


def this_process() -> Identity:
    """Identity of the calling process."""
    host = socket.gethostname()
    pid = os.getpid()
    if sys.platform == "win32":
        return Identity(host, f"{host}/{pid}", pid, "")
    boot = _text(Path("/proc/sys/kernel/random/boot_id"))
    try:
        namespace = str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        namespace = ""
    _, started = _state(f"/proc/{pid}/stat")
    return Identity(host, f"{host}/{boot}/{namespace}", pid, started)


def is_gone(process: Identity) -> bool:
    """Whether a process of this host has ended (a zombie has). Unknown counts as there."""
    if sys.platform == "win32":
        return False
    try:
        os.kill(process.pid, 0)
    except ProcessLookupError:
        return True
    except OSError:  # there, and someone else's
        return False
    if not process.started:
        return False
    state, started = _state(f"/proc/{process.pid}/stat")
    return state in ("Z", "X") or (bool(started) and started != process.started)


def computes(*, but: int) -> bool:
    """Whether a thread of this process runs or waits for a processor, ``but`` for one (native identity).

    False where that is unknown.
    """
    try:
        tasks = [task.name for task in Path("/proc/self/task").iterdir()]
    except OSError:
        return False
    return any(_state(f"/proc/self/task/{task}/stat")[0] == "R" for task in tasks if task != str(but))


def _state(path: str) -> tuple[str, str]:
    """(state, start time) of a Linux process: fields 3 and 22 of proc_pid_stat(5); "" where unknown."""
    fields = _text(Path(path)).rpartition(")")[2].split()  # the name before ")" may hold anything
    return (fields[0], fields[19]) if len(fields) > 19 else ("", "")


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
