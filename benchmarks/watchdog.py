"""The watchdog: what a phase and a note add to the step of a rank. Least of many rounds of one process.

    python benchmarks/watchdog.py [--rounds 50]

Bounds: entering and leaving a phase under 5 microseconds, a note under 1 microsecond.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch.distributed as dist
from common import load_average, write

from polyscale.control.agreement import Control
from polyscale.control.watchdog import Watchdog

CALLS = 1000


def least(work: Callable[[], None], rounds: int) -> float:
    """Microseconds of one of ``CALLS`` calls, in the round that was disturbed least."""
    seconds = []
    for _ in range(rounds):
        started = time.perf_counter()
        for _ in range(CALLS):
            work()
        seconds.append(time.perf_counter() - started)
    return round(1e6 * min(seconds) / CALLS, 3)


def main() -> None:
    """Measure both in one run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=50)
    rounds = parser.parse_args().rounds
    watchdog = Watchdog(Control(dist.HashStore(), 0, 1))

    def phase() -> None:
        with watchdog.phase("forward"):
            pass

    figures = {
        "load_average_before": load_average(),
        "rounds": rounds,
        "phase_us": least(phase, rounds),
        "note_us": least(lambda: watchdog.note("h.3 reduce_scatter"), rounds),
        "nothing_us": least(lambda: None, rounds),
    }
    write("watchdog", figures)


if __name__ == "__main__":
    main()
