"""What every benchmark writes beside its figures: the machine, the load, and a median with its interval."""

from __future__ import annotations

import json
import os
import platform
import random
import statistics
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


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
