"""Topology: which ranks work together, as two views of one world.

Notable: every rank has one place in the dense view (pp, dp_replicate, dp_shard, sp, tp) and one in the expert view
(pp, dp_replicate, edp, ep, etp), with ``edp * ep * etp = dp_shard * sp * tp``; the last axis varies fastest, so tensor
parallel ranks are neighbours. Process groups are asked for by purpose and made here only: once, on first use, by all
ranks in the same order. The axes of a view are DeviceMesh dimensions, so FSDP2, DTensor and pipelining take them as
they are.
"""

from __future__ import annotations

import math
from datetime import timedelta
from typing import TYPE_CHECKING, Literal, get_args

from polyscale import env
from polyscale.errors import ConfigError, RankError, nearest

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

Purpose = Literal["batch", "grad", "expert_grad", "norm", "control", "checkpoint"]

DENSE_AXES = ("pp", "dp_replicate", "dp_shard", "sp", "tp")
EXPERT_AXES = ("pp", "dp_replicate", "edp", "ep", "etp")

# The axes over which a group of each purpose spans; None: the whole world.
_AXES_OF_PURPOSE: dict[str, tuple[str, ...] | None] = {
    "batch": ("dp_replicate", "dp_shard"),
    "grad": ("dp_replicate", "dp_shard", "sp"),
    "expert_grad": ("dp_replicate", "edp"),
    "norm": None,
}


class Topology:
    """The place of this rank among all ranks. Immutable, but for groups that are made on first use.

    Make one with :meth:`build`. ``rank`` and ``world_size`` are those of the default process group; ``local_rank``
    is the number of this rank on its host.
    """

    def __init__(self, sizes: dict[str, int], *, rank: int, world_size: int, local_rank: int, device_type: str) -> None:
        self.rank = rank
        self.world_size = world_size
        self.local_rank = local_rank
        self.device_type = device_type
        self._sizes = sizes
        self._meshes: dict[tuple[str, ...], DeviceMesh] = {}
        self._groups: dict[str, ProcessGroup] = {}
        self._made: list[ProcessGroup] = []
        self._world: ProcessGroup | None = None
        self._closed = False

    @classmethod
    def build(
        cls,
        *,
        dp_replicate: int = 1,
        dp_shard: int = -1,
        tp: int = 1,
        sp: int = 1,
        pp: int = 1,
        ep: int = 1,
        etp: int = 1,
        device_type: str = "cpu",
    ) -> Topology:
        """Lay the axes over the world of the default process group. Collective.

        Args:
            dp_replicate: replicas of the sharded state (hybrid sharding).
            dp_shard: ranks over which data-parallel state is sharded.
            tp: tensor parallel ranks.
            sp: sequence parallel ranks.
            pp: pipeline stages.
            ep: ranks over which experts are spread.
            etp: tensor parallel ranks inside an expert.
            device_type: torch's name of the device that the ranks compute on.

        One of the first five may be -1: it takes the ranks that are left.

        Raises:
            ConfigError: the sizes do not multiply to the world.
            RankError: there is no process group yet.
        """
        import torch.distributed as dist

        if not dist.is_initialized():
            raise RankError(
                "A topology was asked for before there is a process group",
                fix="Call polyscale.initialize, or torch.distributed.init_process_group, first",
            )
        world_size = dist.get_world_size()
        sizes = resolve_sizes(
            {"pp": pp, "dp_replicate": dp_replicate, "dp_shard": dp_shard, "sp": sp, "tp": tp},
            ep=ep,
            etp=etp,
            world_size=world_size,
        )
        rank = dist.get_rank()
        topology = cls(
            sizes, rank=rank, world_size=world_size, local_rank=env.local_rank(rank), device_type=device_type
        )
        topology._world = dist.group.WORLD
        topology._mesh_of(DENSE_AXES)
        return topology

    @property
    def dense(self) -> DeviceMesh:
        """The mesh (pp, dp_replicate, dp_shard, sp, tp)."""
        return self._mesh_of(DENSE_AXES)

    @property
    def expert(self) -> DeviceMesh:
        """The mesh (pp, dp_replicate, edp, ep, etp); collective on first use."""
        return self._mesh_of(EXPERT_AXES)

    @property
    def dp_size(self) -> int:
        """How many ranks see different samples."""
        return self._sizes["dp_replicate"] * self._sizes["dp_shard"]

    @property
    def dp_rank(self) -> int:
        """Which part of a global batch this rank sees, from 0 to ``dp_size - 1``."""
        return self.coordinate("dp_replicate") * self._sizes["dp_shard"] + self.coordinate("dp_shard")

    def size(self, name: str) -> int:
        """Number of ranks along an axis of either view.

        Raises:
            ConfigError: there is no axis of that name.
        """
        if name not in self._sizes:
            raise _no_axis(name)
        return self._sizes[name]

    def coordinate(self, name: str) -> int:
        """Index of this rank along an axis of either view."""
        self.size(name)
        axes = DENSE_AXES if name in DENSE_AXES else EXPERT_AXES
        behind = math.prod(self._sizes[axis] for axis in axes[axes.index(name) + 1 :])
        return self.rank // behind % self._sizes[name]

    @property
    def model_rank(self) -> int:
        """Place of this rank among the ranks that share its samples (pp, sp, tp); 0 without model parallelism."""
        place = self.coordinate("pp")
        for name in ("sp", "tp"):
            place = place * self._sizes[name] + self.coordinate(name)
        return place

    def data_mesh(self) -> DeviceMesh:
        """The mesh over which data-parallel state is sharded: (dp_shard), or (dp_replicate, dp_shard)."""
        return self.mesh("dp_replicate", "dp_shard") if self._sizes["dp_replicate"] > 1 else self.mesh("dp_shard")

    def mesh(self, *names: str) -> DeviceMesh:
        """The sub-mesh of the axes ``names``, which are of one view and in its order."""
        for name in names:
            self.size(name)
        axes = DENSE_AXES if all(name in DENSE_AXES for name in names) else EXPERT_AXES
        places = [axes.index(name) if name in axes else -1 for name in names]
        if not names or -1 in places or places != sorted(set(places)):
            raise ConfigError(
                f"mesh{names!r}",
                why="Axes must belong to one view and stand in its order",
                fix=f"Views: {', '.join(DENSE_AXES)}; {', '.join(EXPERT_AXES)}",
            )
        whole = self._mesh_of(axes)
        return whole if names == axes else whole[names]

    def group(self, purpose: Purpose) -> ProcessGroup | None:
        """The process group of this rank for a purpose. Collective over the world on the first use of each.

        ``batch``: ranks with different samples. ``grad``: ranks over which gradients of dense parameters are summed.
        ``expert_grad``: the same for parameters of experts. ``norm``: all ranks. ``control`` and ``checkpoint``: all
        ranks over gloo, each of its own, so that they can be used from another thread while training goes on.
        """
        if purpose not in get_args(Purpose):
            raise ConfigError(f"process group for {purpose!r}", fix=f"Purposes: {', '.join(get_args(Purpose))}")
        self._check_open()
        if purpose not in self._groups:
            self._groups[purpose] = self._make_group(purpose)
        return self._groups[purpose]

    def close(self) -> None:
        """Free the sub-groups made here; the default process group stays. May be called twice."""
        import torch.distributed as dist

        if self._closed:
            return
        self._closed = True
        made = list(self._made)
        for mesh in self._meshes.values():
            made += mesh.get_all_groups()
        self._groups.clear()
        self._made.clear()
        self._meshes.clear()
        # A default group that ended, or was made anew, has taken its sub-groups along.
        alive = dist.is_initialized() and dist.group.WORLD is self._world
        for group in {id(group): group for group in made}.values():
            if alive and group is not self._world:
                _destroy(group)
        self._world = None

    def __str__(self) -> str:
        """``rank 1 of 4: dp_shard 2 (1), tp 2 (0)``: size and, in brackets, the place of this rank."""
        axes = [f"{name} {self._sizes[name]} ({self.coordinate(name)})" for name in DENSE_AXES if self._sizes[name] > 1]
        axes += [
            f"{name} {self._sizes[name]} ({self.coordinate(name)})" for name in ("ep", "etp") if self._sizes[name] > 1
        ]
        return f"rank {self.rank} of {self.world_size}" + (": " + ", ".join(axes) if axes else "")

    def __repr__(self) -> str:
        return f"<Topology {self}>"

    def _mesh_of(self, axes: tuple[str, ...]) -> DeviceMesh:
        self._check_open()
        if axes not in self._meshes:
            from torch.distributed.device_mesh import init_device_mesh

            shape = tuple(self._sizes[axis] for axis in axes)
            self._meshes[axes] = init_device_mesh(self.device_type, shape, mesh_dim_names=axes)
        return self._meshes[axes]

    def _make_group(self, purpose: str) -> ProcessGroup:
        import torch.distributed as dist

        if purpose in ("control", "checkpoint"):
            group: ProcessGroup = dist.new_group(
                backend="gloo", timeout=timedelta(seconds=env.timeout_s()), group_desc=f"polyscale_{purpose}"
            )
            self._made.append(group)
            return group
        axes = _AXES_OF_PURPOSE[purpose]
        wide = [axis for axis in axes or () if self._sizes[axis] > 1]
        if axes is None or math.prod(self._sizes[axis] for axis in wide) == self.world_size:
            return _known(self._world)
        view = DENSE_AXES if all(axis in DENSE_AXES for axis in wide or axes) else EXPERT_AXES
        if len(wide) < 2:
            return self._mesh_of(view).get_group((wide or list(axes))[0])
        return self._spanning_group(view, wide, purpose)

    def _spanning_group(self, view: tuple[str, ...], axes: list[str], purpose: str) -> ProcessGroup:
        """Make one group for each set of ranks that differ along ``axes`` only; return this rank's."""
        import torch
        import torch.distributed as dist

        ranks = torch.arange(self.world_size).reshape([self._sizes[axis] for axis in view])
        places = [view.index(axis) for axis in axes]
        others = [place for place in range(len(view)) if place not in places]
        span = math.prod(self._sizes[axis] for axis in axes)
        own: ProcessGroup | None = None
        for members in ranks.permute(*others, *places).reshape(-1, span).tolist():
            group = dist.new_group(
                members, timeout=timedelta(seconds=env.timeout_s()), group_desc=f"polyscale_{purpose}"
            )
            if self.rank in members:
                own = group
        self._made.append(_known(own))
        return _known(own)

    def _check_open(self) -> None:
        if self._closed:
            raise RankError("This topology is closed", fix="Build another one")


def resolve_sizes(dense: dict[str, int], *, ep: int, etp: int, world_size: int) -> dict[str, int]:
    """Fill up the axis that is -1 and check that both views multiply to the world.

    Args:
        dense: sizes of the five dense axes; at most one is -1.
        ep: ranks over which experts are spread.
        etp: tensor parallel ranks inside an expert.
        world_size: number of ranks.

    Returns:
        The size of every axis of both views.

    Raises:
        ConfigError: with the numbers that do not fit.
    """
    given = _listed(dense)
    for name, size in {**dense, "ep": ep, "etp": etp}.items():
        valid = isinstance(size, int) and not isinstance(size, bool)
        if not valid or not (size > 0 or (size == -1 and name in dense)):
            raise ConfigError(f"topology.{name} = {size!r}", why="A size is a positive whole number (-1 fills up)")
    open_axes = [name for name, size in dense.items() if size == -1]
    if len(open_axes) > 1:
        raise ConfigError(f"topology with {given}", why="Only one axis can take what is left", fix="Give one of them")
    fixed = math.prod(size for size in dense.values() if size != -1)
    if world_size % fixed or (not open_axes and fixed != world_size):
        raise ConfigError(
            f"topology with {given}",
            why=f"The sizes multiply to {fixed}, and there are {world_size} ranks",
            fix=_how_to_fit(dense, fixed=fixed, world_size=world_size, open_axes=open_axes),
        )
    sizes = {name: world_size // fixed if size == -1 else size for name, size in dense.items()}
    expert_world = sizes["dp_shard"] * sizes["sp"] * sizes["tp"]
    if expert_world % (ep * etp):
        raise ConfigError(
            f"topology with ep = {ep}, etp = {etp}",
            why=f"ep * etp = {ep * etp} does not divide dp_shard * sp * tp = {expert_world}",
            fix=f"Choose ep and etp so that their product divides {expert_world}",
        )
    return {**sizes, "edp": expert_world // (ep * etp), "ep": ep, "etp": etp}


def _how_to_fit(dense: dict[str, int], *, fixed: int, world_size: int, open_axes: list[str]) -> str:
    if open_axes or world_size % fixed:
        return f"Start a multiple of {fixed} ranks, or choose sizes that divide {world_size}"
    others = {name: size for name, size in dense.items() if name != "dp_shard"}
    return f"Start {fixed} ranks, or set dp_shard to -1 or {world_size // math.prod(others.values())}"


def _listed(sizes: dict[str, int]) -> str:
    wide = [f"{name} = {size}" for name, size in sizes.items() if size != 1]
    return ", ".join(wide) or "every size 1"


def _no_axis(name: str) -> ConfigError:
    axes = dict.fromkeys((*DENSE_AXES, *EXPERT_AXES))
    close = nearest(name, axes)
    hint = f"Did you mean {close!r}? " if close else ""
    return ConfigError(
        f"topology axis {name!r}", why="There is none of that name", fix=f"{hint}Axes: {', '.join(axes)}"
    )


def _known(group: ProcessGroup | None) -> ProcessGroup:
    if group is None:
        raise RankError("The default process group has ended", fix="Build the topology again after making a new one")
    return group


def _destroy(group: ProcessGroup) -> None:
    import torch.distributed as dist

    try:
        dist.destroy_process_group(group)
    except ValueError:  # someone else has destroyed it
        return
