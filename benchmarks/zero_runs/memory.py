"""Memory and processor time of processes, as ``/proc`` tells them (proc(5)); zeros where it does not."""

from __future__ import annotations

import os
from pathlib import Path


def used(pids: list[int]) -> dict[str, int]:
    """Bytes of all of ``pids`` together.

    Returns:
        ``pss``: all that is mapped, each page shared out among those that map it. ``data``: what they have written
        themselves, and their part of what is shared between them; not the code of libraries, nor what they share with
        the process that forked them.
    """
    total = {"pss": 0, "data": 0}
    for pid in pids:
        pss, data = _of(pid)
        total["pss"] += pss
        total["data"] += data
    return total


def cpu_seconds(pids: list[int]) -> float:
    """Processor time that ``pids`` have used."""
    ticks = 0
    for pid in pids:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def _of(pid: int) -> tuple[int, int]:
    try:
        lines = Path(f"/proc/{pid}/smaps").read_text().splitlines()
    except OSError:
        return 0, 0
    pss = data = mine = written = 0
    for line in lines:
        name, _, rest = line.partition(":")
        if name == "Pss":
            mine = int(rest.split()[0])
            pss += mine
        elif name == "Private_Dirty":
            written = int(rest.split()[0])
        elif name == "VmFlags":  # the last line of a mapping; "sh": shared memory, not a private mapping
            data += mine if "sh" in rest.split() else written
    return 1024 * pss, 1024 * data
