"""Start-up: what polyscale adds to ``import torch``. Minimum of alternating runs of whole processes.

    python benchmarks/startup.py [--runs 10]

Bounds: ``import polyscale; polyscale.initialize`` at most 1.1 x ``import torch``, ``scale-report`` at most 1.25 x,
``scale-report --list`` under 0.4 s of processor time.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

from common import load_average, write

SCRIPTS = Path(sysconfig.get_path("scripts"))


def measure(command: list[str]) -> tuple[float, float]:
    """Wall and processor seconds of one run."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    started = time.perf_counter()
    # Byte code may be cached, as it is on a user's machine.
    environ = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environ)
    wall = time.perf_counter() - started
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Run all commands in turn, several times."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=10)
    runs = parser.parse_args().runs
    commands = {
        "import torch": [sys.executable, "-c", "import torch"],
        "polyscale.initialize": [sys.executable, "-c", "import polyscale; polyscale.initialize"],
        "scale-report": [str(SCRIPTS / "scale-report")],
        "scale-report --list": [str(SCRIPTS / "scale-report"), "--list"],
    }
    wall: dict[str, list[float]] = {name: [] for name in commands}
    cpu: dict[str, list[float]] = {name: [] for name in commands}
    load = load_average()
    for _ in range(runs + 1):  # the first run fills the file cache and is dropped
        for name, command in commands.items():
            seconds = measure(command)
            wall[name].append(seconds[0])
            cpu[name].append(seconds[1])
    least = {name: round(min(values[1:]), 3) for name, values in wall.items()}
    torch = least["import torch"]
    write(
        "startup",
        {
            "load_average_before": load,
            "runs": runs,
            "wall_s": least,
            "cpu_s": {name: round(min(values[1:]), 3) for name, values in cpu.items()},
            "ratio_to_import_torch": {name: round(seconds / torch, 3) for name, seconds in least.items()},
        },
    )


if __name__ == "__main__":
    main()
