"""Ends ranks whose launcher was killed: a program of its own, which the launcher starts and a signal to it misses.

Notable: standard input is the lifeline. The launcher writes the process groups of its ranks, one per line, and "done"
at its end. Where the pipe closes without that, the groups are asked to end, and what outlasts the grace is killed.

It imports the standard library only, and little of that: it is there in milliseconds.
"""

from __future__ import annotations

import os
import signal
import sys
import time

GRACE_S = 3.0
_POLL_S = 0.05


def main() -> None:
    """Read until the launcher ends; then end what it has not."""
    groups: list[int] = []
    for line in sys.stdin:
        if line.strip() == "done":
            return
        groups.append(int(line))
    left = _send(groups, signal.SIGTERM)
    end = time.monotonic() + GRACE_S
    while left and time.monotonic() < end:
        time.sleep(_POLL_S)
        left = _send(left, 0)
    _send(left, signal.SIGKILL)


def _send(groups: list[int], number: int) -> list[int]:
    """Send a signal (0: none) to process groups; returns those that are there."""
    there = []
    for group in groups:
        try:
            os.killpg(group, number)
        except (ProcessLookupError, PermissionError):
            continue
        there.append(group)
    return there


if __name__ == "__main__":
    main()
