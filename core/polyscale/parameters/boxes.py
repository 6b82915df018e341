"""Where a rank's part of a logical tensor lies, when model-parallel and data-parallel axes cut it into blocks.

Every cut follows ``torch.chunk``: of n indices over w ranks, each takes ceil(n / w), the last ones less or nothing. An
axis that does not cut replicates; of replicas, the rank at coordinate 0 owns the block (writes it to checkpoints).
"""

from __future__ import annotations

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
