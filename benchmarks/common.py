"""What every benchmark writes beside its figures: the machine, the load, and a median with its interval."""

from __future__ import annotations

import json
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Collection
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
BUSY_CORES = 0.5


def machine() -> dict[str, Any]:
    """Processor, cores, memory, versions, date."""
    cpu = next(
        (line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")),
        platform.processor(),
    )
    memory = next((int(line.split()[1]) for line in _lines("/proc/meminfo") if line.startswith("MemTotal")), 0)
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "memory_gib": round(memory / 2**20, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": metadata.version("torch"),
        "date": date.today().isoformat(),
    }


def load_average() -> float:
    """Load average of the last minute, or -1 where the system does not tell."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else -1.0


def busy_share(exclude: Collection[int], seconds: float = 1.0) -> float:
    """Cores that processes other than ours kept busy over the last ``seconds``.

    Args:
        exclude: process ids that are ours; this process and the descendants of all of them are ours too.
        seconds: how long to look; a tick of the clock is 1/100 s, so that a second tells 0.02 cores.

    Returns:
        0.0 for a machine that is ours, its number of cores for one that is wholly another's; -1.0 without /proc.
    """
    ours = {*exclude, os.getpid()}
    started, total = time.monotonic(), _busy_ticks()
    mine = _ticks_of(ours)
    time.sleep(seconds)
    ended, others = time.monotonic(), _busy_ticks() - total
    others -= _ticks_of(ours) - mine
    passed = ended - started
    return max(0.0, others / os.sysconf("SC_CLK_TCK") / passed) if total else -1.0


def require_idle(exclude: Collection[int] = (), *, limit: float = BUSY_CORES, seconds: float = 1.0) -> float:
    """Return the cores that others keep busy, or end the program where they are more than ``limit``.

    Args:
        exclude: process ids that are ours, as for :func:`busy_share`.
        limit: cores that others may use.
        seconds: how long to look.

    Raises:
        SystemExit: with code 2, after a message with the figure.
    """
    share = busy_share(exclude, seconds)
    if share > limit:
        print(
            f"refused: other processes use {share:.2f} cores (load average {load_average():.2f}); at most {limit:.2f} "
            "may be in use, or the figures say more of them than of this code. Run it on an idle machine.",
            file=sys.stderr,
        )
        raise SystemExit(2)
    return share


def median_interval(values: list[float], *, draws: int = 2000) -> tuple[float, float, float]:
    """Median, and the bounds of its 95 % bootstrap interval."""
    chooser = random.Random(0)
    medians = sorted(statistics.median(chooser.choices(values, k=len(values))) for _ in range(draws))
    return statistics.median(values), medians[int(0.025 * draws)], medians[int(0.975 * draws) - 1]


def write(name: str, figures: dict[str, Any]) -> None:
    """Print ``figures`` and write them with the machine to ``results/<name>.json``."""
    RESULTS.mkdir(exist_ok=True)
    text = json.dumps({"machine": machine(), **figures}, indent=1)
    (RESULTS / f"{name}.json").write_text(text + "\n")
    print(text)


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def _busy_ticks() -> int:
    """Ticks that all processors spent on anything but waiting; 0 without /proc."""
    fields = next((line.split()[1:] for line in _lines("/proc/stat") if line.startswith("cpu ")), [])
    return sum(int(fields[index]) for index in (0, 1, 2, 5, 6)) if fields else 0  # user, nice, system, interrupts


def _ticks_of(roots: set[int]) -> int:
    """Ticks of ``roots`` and their descendants; those of a child that ended have gone to the parent that waited."""
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        for line in _lines(str(path))[:1]:
            fields = line.rpartition(")")[2].split()  # what follows the name, which may hold blanks
            pid = int(path.parent.name)
            parents[pid] = int(fields[1])
            ticks[pid] = sum(int(field) for field in fields[11:15])
    return sum(count for pid, count in ticks.items() if _descends(pid, roots, parents))


def _descends(pid: int, roots: set[int], parents: dict[int, int]) -> bool:
    while pid and pid not in roots:
        pid = parents.get(pid, 0)
    return pid in roots
