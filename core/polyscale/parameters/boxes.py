"""Where a rank's part of a logical tensor lies, when model-parallel and data-parallel axes cut it into blocks.

Every cut follows ``torch.chunk``: of n indices over w ranks, each takes ceil(n / w), the last ones less or nothing. An
axis that does not cut replicates; of replicas, the rank at coordinate 0 owns the block (writes it to checkpoints).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from polyscale.parameters.info import ParamInfo


@dataclass(frozen=True)
class Region:
    """A block of a logical tensor: first indices, lengths, and whether this rank owns it among its replicas."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    owner: bool = True

    def chunk(self, dim: int, index: int, count: int) -> Region:
        """The ``index``-th of ``count`` chunks of this block along ``dim``."""
        length = self.sizes[dim]
        step = -(-length // count)
        start = min(index * step, length)
        size = min(step, length - start)
        offsets = (*self.offsets[:dim], self.offsets[dim] + start, *self.offsets[dim + 1 :])
        return Region(offsets, (*self.sizes[:dim], size, *self.sizes[dim + 1 :]), self.owner)

    def cut(self, full: torch.Tensor) -> torch.Tensor:
        """This block of ``full`` (a view)."""
        for dim, (offset, size) in enumerate(zip(self.offsets, self.sizes, strict=True)):
            full = full.narrow(dim, offset, size)
        return full


def model_parallel_region(info: ParamInfo) -> Region:
    """The block that model-parallel axes leave to this rank, before data parallelism."""
    return sharded_region(info.shape, info.mesh, info.placements)


def sharded_region(shape: tuple[int, ...], mesh: Any, placements: tuple[Any, ...]) -> Region:
    """The block of a tensor of ``shape`` that ``placements`` on ``mesh`` (None: not cut) give to this rank."""
    region = Region((0,) * len(shape), shape)
    if mesh is None:
        return region
    coordinate = mesh.get_coordinate()
    for axis, placement in enumerate(placements):
        if placement.is_shard():
            region = region.chunk(placement.dim, coordinate[axis], mesh.size(axis))
        elif coordinate[axis] != 0:
            region = Region(region.offsets, region.sizes, owner=False)
    return region


@dataclass(frozen=True)
class RangeBox:
    """A block that lies together in a flattened tensor: first indices, lengths, and its first element."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.sizes)


def range_boxes(shape: tuple[int, ...], start: int, stop: int) -> list[RangeBox]:
    """Cut the elements from ``start`` to ``stop`` of a flattened tensor of ``shape`` into blocks of the tensor.

    Each block lies together in the flattened tensor; there are at most ``2 * len(shape) - 1`` of them, in order.
    """
    if start >= stop:
        return []
    if not shape:
        return [RangeBox((), (), start)]
    row = math.prod(shape[1:])
    first, last = start // row, (stop - 1) // row
    if len(shape) == 1:
        return [RangeBox((start,), (stop - start,), start)]
    if first == last and (start % row or stop % row):
        return _in_row(shape, first, start - first * row, stop - first * row)
    boxes = []
    if start % row:
        boxes += _in_row(shape, first, start - first * row, row)
        first += 1
    whole = stop // row - first
    if whole > 0:
        boxes.append(RangeBox((first, *(0 for _ in shape[1:])), (whole, *shape[1:]), first * row))
    if stop % row:
        boxes += _in_row(shape, last, 0, stop - last * row)
    return boxes


def _in_row(shape: tuple[int, ...], index: int, start: int, stop: int) -> list[RangeBox]:
    row = math.prod(shape[1:])
    return [
        RangeBox((index, *box.offsets), (1, *box.sizes), index * row + box.start)
        for box in range_boxes(shape[1:], start, stop)
    ]
