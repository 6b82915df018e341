"""The order in which units were visited in the last pass, and what it tells of the present one.

Notable: a model may take another path at any time. A visit that was not foreseen is looked for further on in the last
order, and where it is not there either, nothing is foreseen until a known one comes.
"""

from __future__ import annotations

from collections.abc import Iterator

LONGEST = 100_000
"""Visits that are recorded between two ends of a pass; a loop that never runs backward would grow without end."""


class VisitOrder:
    """Records visits, and foresees the next ones from those of the last pass."""

    def __init__(self) -> None:
        self._last: list[int] = []
        self._now: list[int] = []
        self._place: int | None = 0

    def visit(self, unit: int) -> None:
        """A unit is about to run."""
        if len(self._now) < LONGEST:
            self._now.append(unit)
        self._place = self._after(unit)

    def upcoming(self) -> Iterator[int]:
        """The units expected next, in order."""
        if self._place is not None:
            yield from self._last[self._place :]

    def end(self) -> None:
        """The pass is over: what was seen is what the next one is expected to be."""
        if self._now:
            self._last = self._now
        self._now, self._place = [], 0

    def _after(self, unit: int) -> int | None:
        start = self._place or 0
        for places in (range(start, len(self._last)), range(start)):
            for place in places:
                if self._last[place] == unit:
                    return place + 1
        return None
