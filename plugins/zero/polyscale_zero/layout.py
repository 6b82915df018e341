"""Where parameters lie in a flat buffer, and which part of them a rank owns.

Notable: plain arithmetic, in elements. Every parameter starts at a multiple of 64 bytes, and so does every shard; what
lies between belongs to no parameter and is never read.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

ALIGNMENT_BYTES = 64


@dataclass(frozen=True)
class Slot:
    """A parameter's place: its name, local shape, first element and number of elements."""

    name: str
    shape: tuple[int, ...]
    offset: int
    numel: int

    @property
    def end(self) -> int:
        """The element after the last."""
        return self.offset + self.numel


@dataclass(frozen=True)
class Span:
    """What a rank owns of a parameter.

    Attributes:
        first: element of the flattened parameter that it begins with.
        numel: how many it owns (possibly none).
        in_shard: where they begin in the rank's shard.
    """

    first: int
    numel: int
    in_shard: int


class Layout:
    """The slots of one flat buffer that is cut into ``world`` equal shards.

    Attributes:
        slots: name -> slot, in order.
        numel: elements of the buffer: ``world`` times ``shard``.
        shard: elements of a shard.
    """

    def __init__(self, parameters: Iterable[tuple[str, tuple[int, ...]]], *, itemsize: int, world: int) -> None:
        """``itemsize``: bytes of the smallest element that buffers of this layout have."""
        step = max(1, ALIGNMENT_BYTES // itemsize)
        self.slots: dict[str, Slot] = {}
        end = 0
        for name, shape in parameters:
            numel = 1
            for size in shape:
                numel *= size
            self.slots[name] = Slot(name, shape, end, numel)
            end = _up(end + numel, step)
        self.shard = _up(-(-end // world), step)
        self.numel = self.shard * world

    def span(self, name: str, rank: int) -> Span:
        """What ``rank`` owns of a parameter."""
        slot = self.slots[name]
        start, stop = rank * self.shard, (rank + 1) * self.shard
        first, last = max(slot.offset, start), min(slot.end, stop)
        if last <= first:
            return Span(0, 0, 0)
        return Span(first - slot.offset, last - first, first - start)


def _up(number: int, step: int) -> int:
    return -(-number // step) * step
