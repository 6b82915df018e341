"""Do blocks tile a tensor? Pure arithmetic on offsets and sizes, with no tensor and no device.

Notable: what is written must cover each element once. A gap would be read as garbage, an overlap means that two ranks
believe to own the same elements; both are found before a byte is written.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Block:
    """Elements ``offsets`` to ``offsets + sizes`` of a tensor, held by ``rank``."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    rank: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.sizes)

    def meets(self, other: Block) -> bool:
        """Whether the two share elements."""
        mine = zip(self.offsets, self.sizes, strict=True)
        theirs = zip(other.offsets, other.sizes, strict=True)
        return all(a < b + size_b and b < a + size_a for (a, size_a), (b, size_b) in zip(mine, theirs, strict=True))


def inside(shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int]) -> bool:
    """Whether a block has the tensor's number of dimensions and lies in it."""
    if not len(shape) == len(offsets) == len(sizes):
        return False
    return all(first >= 0 and first + size <= whole for whole, first, size in zip(shape, offsets, sizes, strict=True))


def fault(shape: Sequence[int], blocks: Sequence[Block]) -> str:
    """Say why non-empty ``blocks`` do not tile a tensor of ``shape``; "" when they do.

    Sorted along the longest dimension, each block is compared with those that are still open, so tilings by rows or
    flat ranges cost O(n log n).
    """
    overlap = _overlap(shape, blocks)
    if overlap is not None:
        first, second = overlap
        twice = f"rank {first.rank} owns {_place(first)} twice"
        return twice if first.rank == second.rank else f"ranks {first.rank} and {second.rank} both own {_place(first)}"
    held = sum(block.numel for block in blocks)
    whole = math.prod(shape)
    return "" if held == whole else f"its boxes hold {held} of {whole} elements: no rank owns the others"


def _overlap(shape: Sequence[int], blocks: Sequence[Block]) -> tuple[Block, Block] | None:
    if not shape:
        return (blocks[0], blocks[1]) if len(blocks) > 1 else None
    axis = max(range(len(shape)), key=lambda dimension: shape[dimension])
    order = sorted(range(len(blocks)), key=lambda index: blocks[index].offsets[axis])
    unfinished: list[tuple[int, int]] = []  # (end along the axis, index), by end
    for index in order:
        block = blocks[index]
        start = block.offsets[axis]
        closed = next((place for place, (end, _) in enumerate(unfinished) if end > start), len(unfinished))
        del unfinished[:closed]
        for _, other in unfinished:
            if block.meets(blocks[other]):
                return blocks[other], block
        insort(unfinished, (start + block.sizes[axis], index))
    return None


def _place(block: Block) -> str:
    last = [first + size for first, size in zip(block.offsets, block.sizes, strict=True)]
    return "[" + ", ".join(f"{first}:{end}" for first, end in zip(block.offsets, last, strict=True)) + "]"
