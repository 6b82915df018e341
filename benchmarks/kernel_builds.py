"""Kernel builds: cold, after a build that was killed, and the first use of an op that is built.

    python benchmarks/kernel_builds.py [--runs 11]

Bounds: ``scale build --all`` with an empty cache under 40 s on 2 cores; after ``kill -9`` in the middle within the time
of one build; the first use of a built op in a fresh process, after ``import torch`` and nothing of polyscale, under
50 ms (median). Beside it: the same where an accelerator has been chosen before, as ``initialize`` does, and the
compiler alone on the same sources in turn.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

from common import load_average, write

SCALE = str(Path(sysconfig.get_path("scripts")) / "scale")
WARM = """
import gc, sys, time, torch
gc.freeze()  # a full collection of torch's objects, 0.2 s, may else fall into what is measured
if "chosen" in sys.argv:
    from polyscale.discovery import select_accelerator
    select_accelerator("cpu").activate()
started = time.perf_counter()
import polyscale
from polyscale import ops
ops.use("fused_adam_", "cpu")
print(time.perf_counter() - started)
"""


def environment(cache: Path) -> dict[str, str]:
    """This environment with ``cache`` as the cache folder; byte code may be cached, as it is on a user's machine."""
    rest = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    return {**rest, "POLYSCALE_CACHE": str(cache)}


def build(cache: Path) -> float:
    """Seconds of ``scale build --all``, its start included."""
    started = time.perf_counter()
    subprocess.run([SCALE, "build", "--all"], check=True, env=environment(cache), capture_output=True)
    return time.perf_counter() - started


def killed_build(cache: Path) -> None:
    """Begin to build, and kill it while compilers run."""
    with subprocess.Popen([SCALE, "build", "--all"], env=environment(cache), stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        assert b"Building" in process.stderr.readline()
        time.sleep(1.5)
        process.send_signal(signal.SIGKILL)


def first_use(cache: Path, before: str) -> float:
    """Seconds of the first use of an op in a new process that has imported torch."""
    command = [sys.executable, "-c", WARM, before]
    done = subprocess.run(command, check=True, env=environment(cache), capture_output=True, text=True)
    return float(done.stdout)


def milliseconds(seconds: list[float]) -> dict[str, float]:
    """Least and median."""
    return {"least": round(1000 * min(seconds), 1), "median": round(1000 * statistics.median(seconds), 1)}


def by_hand() -> float:
    """Seconds of the compiler for the same sources, one after the other."""
    from polyscale.ops import modules
    from polyscale.ops.recipe import recipe
    from polyscale.ops.tools import pybind11_folder

    (module,) = [each for each in modules() if each.name == "cpu_ops"]
    found = recipe(module)
    host = found.tools().host
    includes = [f"-I{pybind11_folder()}", f"-I{sysconfig.get_path('include')}", f"-I{module.folder}"]
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        for number, source in enumerate(found.sources):
            flags = [*host.flags, "-std=c++17", "-fPIC", *module.flags, *source.flags, *includes]
            command = [host.compiler, "-c", str(module.folder / source.path), "-o", f"{folder}/{number}.o", *flags]
            subprocess.run(command, check=True)
    return time.perf_counter() - started


def main() -> None:
    """Measure all of it in one run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=11)
    runs = parser.parse_args().runs
    load = load_average()
    with tempfile.TemporaryDirectory() as folder:
        cold = build(Path(folder) / "cold")
        killed_build(Path(folder) / "killed")
        again = build(Path(folder) / "killed")
        warm: dict[str, list[float]] = {"chosen": [], "nothing": []}
        for _ in range(runs + 1):  # the first run fills the file cache and is dropped
            for before, seconds in warm.items():
                seconds.append(first_use(Path(folder) / "cold", before))
    hand = by_hand()
    write(
        "kernel_builds",
        {
            "load_average_before": load,
            "cold_s": round(cold, 2),
            "after_kill_s": round(again, 2),
            "after_kill_per_cold": round(again / cold, 3),
            "compiler_by_hand_s": round(hand, 2),
            "cold_per_by_hand": round(cold / hand, 3),
            "runs": runs,
            "first_use_in_a_fresh_process_after_import_torch_ms": milliseconds(warm["nothing"][1:]),
            "first_use_where_an_accelerator_was_chosen_ms": milliseconds(warm["chosen"][1:]),
        },
    )


if __name__ == "__main__":
    main()
