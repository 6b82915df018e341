"""The meshes and groups of a process, shared by all its topologies until the default process group ends.

Notable: torch keeps what it has computed for a DeviceMesh in caches that hold for every equal mesh, and equality looks
at ranks and names, not at process groups. A cached result names the groups of the mesh it was computed for. Were each
engine to make and destroy its own, the next engine of the same layout would look up groups that are gone. So a layout
has one mesh per default process group; when that is made anew, the caches are emptied (docs/adr/0003).
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING

from polyscale import _torch, env
from polyscale.errors import RankError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

Parts = tuple[tuple[int, ...], ...]
"""A cut of the world into sets of ranks."""


class Shared:
    """What is made once over one default process group. Each method is collective on the first use of its arguments.

    Args:
        world: the default process group.
    """

    def __init__(self, world: ProcessGroup) -> None:
        self._world = weakref.ref(world)
        self._meshes: dict[tuple[str, tuple[str, ...], tuple[int, ...]], DeviceMesh] = {}
        self._groups: dict[tuple[str, Parts], ProcessGroup] = {}

    @property
    def world(self) -> ProcessGroup:
        """The default process group.

        Raises:
            RankError: it has ended, or another one was made since.
        """
        world = self._world()
        if world is None or not self.is_current():
            raise RankError(
                "The default process group has ended", fix="Build the topology again after making a new one"
            )
        return world

    def is_current(self) -> bool:
        """Whether the default process group is still the one this was made for."""
        import torch.distributed as dist

        return dist.is_initialized() and dist.group.WORLD is self._world()

    def mesh(self, device_type: str, axes: tuple[str, ...], shape: tuple[int, ...]) -> DeviceMesh:
        """The mesh of all ranks with these axes."""
        from torch.distributed.device_mesh import init_device_mesh

        assert self.world is not None
        key = (device_type, axes, shape)
        if key not in self._meshes:
            self._meshes[key] = init_device_mesh(device_type, shape, mesh_dim_names=axes)
        return self._meshes[key]

    def group(self, parts: Parts, use: str = "") -> ProcessGroup:
        """The group of this rank among ``parts``, which cut the whole world; each ``use`` has groups of its own."""
        import torch.distributed as dist

        rank = dist.get_rank(self.world)
        if (use, parts) not in self._groups:
            made = [
                dist.new_group(list(part), timeout=timedelta(seconds=env.timeout_s()), group_desc="polyscale_span")
                for part in parts
            ]
            self._groups[use, parts] = next(group for part, group in zip(parts, made, strict=True) if rank in part)
        return self._groups[use, parts]


def shared() -> Shared:
    """What this process shares over the present default process group.

    Raises:
        RankError: there is no process group.
    """
    import torch.distributed as dist

    world = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    if world is None:
        raise RankError(
            "A topology was asked for before there is a process group",
            fix="Call polyscale.initialize, or torch.distributed.init_process_group, first",
        )
    latest = _latest()
    if latest.shared is None or not latest.shared.is_current():
        _torch.forget_meshes()
        latest.shared = Shared(world)
    return latest.shared


@dataclass
class _Latest:
    """What was shared last; a new default process group replaces it."""

    shared: Shared | None = None


@cache
def _latest() -> _Latest:
    return _Latest()
