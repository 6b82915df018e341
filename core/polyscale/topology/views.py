"""Topology: which ranks work together, as two views of one world.

Notable: every rank has one place in the dense view (pp, dp_replicate, dp_shard, sp, tp) and one in the expert view
(pp, dp_replicate, edp, ep, etp), with ``edp * ep * etp = dp_shard * sp * tp``; the last axis varies fastest, so tensor
parallel ranks are neighbours. Process groups are asked for by purpose and come from here only: once, on first use, by
all ranks in the same order. The axes of a view are DeviceMesh dimensions, so FSDP2, DTensor and pipelining take them as
they are. Topologies of one layout share their meshes (see ``polyscale.topology.shared``).
"""

from __future__ import annotations

import contextlib
import math
from datetime import timedelta
from typing import TYPE_CHECKING, Literal, get_args

from polyscale import env
from polyscale.errors import ConfigError, RankError
from polyscale.topology.shared import Shared, shared
from polyscale.topology.sizes import (
    ALL_AXES,
    DENSE_AXES,
    EXPERT_AXES,
    check_axis,
    coordinate,
    parts_along,
    resolve_sizes,
    view_of,
)

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

Purpose = Literal["batch", "grad", "expert_grad", "shard", "replicate", "gather", "norm", "control", "checkpoint"]

# The axes over which a group of each purpose spans; none: the whole world.
_AXES_OF_PURPOSE: dict[str, tuple[str, ...]] = {
    "batch": ("dp_replicate", "dp_shard"),
    "grad": ("dp_replicate", "dp_shard", "sp"),
    "expert_grad": ("dp_replicate", "edp"),
    "shard": ("dp_shard",),
    "replicate": ("dp_replicate",),
    "gather": ("dp_shard",),
    "norm": (),
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
        self._shared: Shared | None = None
        self._own: dict[str, ProcessGroup] = {}  # those of other threads, which no other topology may use
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

        common = shared()
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
        topology._shared = common
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

    @property
    def wide_axes(self) -> tuple[str, ...]:
        """The axes of both views along which there is more than one rank: the kinds of parallelism in use."""
        return tuple(name for name in ALL_AXES if self._sizes[name] > 1)

    def size(self, name: str) -> int:
        """Number of ranks along an axis of either view.

        Raises:
            ConfigError: there is no axis of that name.
        """
        check_axis(name)
        return self._sizes[name]

    def coordinate(self, name: str) -> int:
        """Index of this rank along an axis of either view.

        Raises:
            ConfigError: there is no axis of that name.
        """
        return coordinate(name, self._sizes, self.rank)

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
        axes = view_of(*names)
        whole = self._mesh_of(axes)
        return whole if names == axes else whole[names]

    def group(self, purpose: Purpose) -> ProcessGroup | None:
        """The process group of this rank for a purpose. Collective over the world on the first use of each.

        ``batch``: ranks with different samples. ``grad``: ranks over which gradients of dense parameters are summed.
        ``expert_grad``: the same for parameters of experts. ``shard``: ranks among which dense state is cut.
        ``replicate``: ranks that hold the same shard of it. ``gather``: the ranks of ``shard`` in a group of its own,
        so that gathers and reductions need no common order. ``norm``: all ranks. ``control`` and ``checkpoint``: all
        ranks over gloo, each of its own, so that they can be used from another thread while training goes on.
        """
        if purpose not in get_args(Purpose):
            raise ConfigError(f"process group for {purpose!r}", fix=f"Purposes: {', '.join(get_args(Purpose))}")
        if purpose in ("control", "checkpoint"):
            return self._own_group(purpose)
        common = self._check_open()
        if purpose == "gather":
            return common.group(parts_along(["dp_shard"], DENSE_AXES, self._sizes), use="gather")
        wide = [axis for axis in _AXES_OF_PURPOSE[purpose] if self._sizes[axis] > 1]
        if purpose == "norm" or math.prod(self._sizes[axis] for axis in wide) == self.world_size:
            return common.world
        if len(wide) < 2:
            axis = (wide or list(_AXES_OF_PURPOSE[purpose]))[0]
            return self._mesh_of(view_of(axis)).get_group(axis)
        view = view_of(*wide)
        return common.group(parts_along(wide, view, self._sizes))

    def close(self) -> None:
        """Let go of the meshes, and free the groups for ``control`` and ``checkpoint``. May be called twice.

        Meshes and their groups stay until the default process group ends: other topologies of this process use them,
        now or later, and torch's caches name them.
        """
        import torch.distributed as dist

        if self._closed:
            return
        self._closed = True
        own, self._own = self._own, {}
        common, self._shared = self._shared, None
        # A default group that ended, or was made anew, has taken its sub-groups along.
        if common is not None and common.is_current():
            for group in own.values():
                with contextlib.suppress(ValueError):  # someone else has destroyed it
                    dist.destroy_process_group(group)

    def __str__(self) -> str:
        """``rank 1 of 4: dp_shard 2 (1), tp 2 (0)``: size and, in brackets, the place of this rank."""
        named = [name for name in self.wide_axes if name != "edp"]  # edp is what the others leave of dp_shard
        axes = [f"{name} {self._sizes[name]} ({self.coordinate(name)})" for name in named]
        return f"rank {self.rank} of {self.world_size}" + (": " + ", ".join(axes) if axes else "")

    def __repr__(self) -> str:
        return f"<Topology {self}>"

    def _mesh_of(self, axes: tuple[str, ...]) -> DeviceMesh:
        shape = tuple(self._sizes[axis] for axis in axes)
        return self._check_open().mesh(self.device_type, axes, shape)

    def _own_group(self, purpose: str) -> ProcessGroup:
        import torch.distributed as dist

        self._check_open()
        if purpose not in self._own:
            group = dist.new_group(
                backend="gloo", timeout=timedelta(seconds=env.timeout_s()), group_desc=f"polyscale_{purpose}"
            )
            # A rank is done when its own connections stand. It must not close them while another still makes its own.
            group.barrier().wait()
            self._own[purpose] = group
        return self._own[purpose]

    def _check_open(self) -> Shared:
        if self._closed:
            raise RankError("This topology is closed", fix="Build another one")
        if self._shared is None:
            self._shared = shared()
        return self._shared
