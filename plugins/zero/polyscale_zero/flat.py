"""One flat buffer of a unit: the whole parameters, this rank's shard of them, and the masters that are trained.

Notable: parameters are ``.data`` views into ``whole``, which never changes its storage. An all-gather writes into it
and nothing is copied in or out. Stage 3 frees by resizing the storage to nothing and gathers into the same storage
again, because the graph of a started backward refers to it. ``shard`` is what the other ranks are given: a part of
``whole`` below stage 3, memory of its own at stage 3. ``master`` is what the optimizer updates: the shard itself where
it has the master's dtype.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from polyscale.errors import UnsupportedError
from polyscale_zero import _torch
from polyscale_zero.layout import Layout, Span
from polyscale_zero.released import Refusals

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from polyscale.interfaces.communication import Communication, Work

SHARE_OPTION = "backends.options.zero.share_host_memory"
SHARE_FIX = 'Set backends.communication to "shm" (polyscale-communication) with all ranks on one host, or leave it out'


@dataclass(frozen=True)
class Sharding:
    """Over which ranks buffers are cut, and where they are.

    Attributes:
        gather: group of the ranks that hold one set of shards, for gathers alone; None in a world of 1.
        reduce: the same ranks, for reductions.
        replicate: group of the ranks that hold the same shard; None where each is held once.
        world: number of shards.
        rank: which of them is this rank's.
    """

    communication: Communication
    device: torch.device
    gather: ProcessGroup | None
    reduce: ProcessGroup | None
    replicate: ProcessGroup | None
    world: int
    rank: int

    def allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A 1-D buffer that the others may read."""
        return self.communication.allocate(numel, dtype=dtype, device=self.device)

    def share(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """One piece of memory that all these ranks have, 1-D. Collective.

        Raises:
            UnsupportedError: on every rank, where one cannot have it.
        """
        maker: Any = self.communication
        try:
            made: torch.Tensor = maker.shared(numel, dtype=dtype, group=self.gather)
        except UnsupportedError as error:
            raise UnsupportedError(SHARE_OPTION, why=error.why or error.given, fix=SHARE_FIX) from error
        return made


@dataclass(frozen=True)
class Kind:
    """What the parameters of one buffer have in common.

    Attributes:
        compute: dtype of the whole parameters.
        master: dtype of what the optimizer updates.
        requires_grad: whether they are trained.
        resident: whether they stay whole between uses.
        mesh: a number for the mesh and placements they are DTensors with, -1 for none.
    """

    compute: torch.dtype
    master: torch.dtype
    requires_grad: bool
    resident: bool
    mesh: int = -1


class Flat:
    """See the module.

    Attributes:
        parameters: name -> the module's parameter, the same object for good.
        is_whole: whether ``whole`` holds the values of all shards.
    """

    def __init__(
        self,
        name: str,
        kind: Kind,
        parameters: dict[str, nn.Parameter],
        sharding: Sharding,
        *,
        shared: bool = False,
    ) -> None:
        """``shared``: ``whole`` is one piece of memory that all ranks of the host map."""
        self.name, self.kind, self.parameters, self.sharding = name, kind, parameters, sharding
        shapes = [(fqn, tuple(_torch.inner(parameter).shape)) for fqn, parameter in parameters.items()]
        smallest = min(kind.compute.itemsize, kind.master.itemsize)
        self.layout = Layout(shapes, itemsize=smallest, world=sharding.world)
        self.shared = shared
        self.is_whole = True
        self._refusals = Refusals(parameters)
        self._work: Work | None = None
        self._lost: Work | None = None  # may still write into the buffer, which is not freed until it has ended
        numel, rank, size = self.layout.numel, sharding.rank, self.layout.shard
        if kind.resident:
            self.whole = sharding.share(numel, kind.compute) if shared else sharding.allocate(numel, kind.compute)
            self.shard = self.whole[rank * size : (rank + 1) * size]
        else:  # has memory until the first release: torch makes no views of an empty storage
            self.whole = torch.empty(numel, dtype=kind.compute, device=sharding.device)
            self.shard = sharding.allocate(size, kind.compute)
        same = kind.master == kind.compute
        self.master = self.shard if same else torch.empty(size, dtype=kind.master, device=sharding.device)
        self.fragments = {fqn: self.part(self.master, fqn) for fqn in parameters}

    @property
    def numel(self) -> int:
        """Elements of the whole buffer."""
        return self.layout.numel

    @property
    def pending(self) -> bool:
        """Whether a gather is under way."""
        return self._work is not None

    def span(self, fqn: str, rank: int | None = None) -> Span:
        """What a rank (default: this one) owns of a parameter."""
        return self.layout.span(fqn, self.sharding.rank if rank is None else rank)

    def views(self, buffer: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, view in the parameter's shape) of every parameter in a buffer of this layout."""
        for fqn in self.layout.slots:
            yield fqn, self.view(buffer, fqn)

    def view(self, buffer: torch.Tensor, fqn: str) -> torch.Tensor:
        """The part of a buffer of this layout that belongs to a parameter, in its shape."""
        slot = self.layout.slots[fqn]
        return buffer[slot.offset : slot.end].view(slot.shape)

    def part(self, shard: torch.Tensor, fqn: str) -> torch.Tensor:
        """This rank's part of a parameter in a shard of this layout, 1-D and possibly empty."""
        span = self.span(fqn)
        return shard[span.in_shard : span.in_shard + span.numel]

    @torch.no_grad()
    def fill(self, fqn: str, value: torch.Tensor) -> None:
        """Give a parameter its value (local shape, any dtype): whole where it is resident, and its master."""
        if self.kind.resident and not self.shared:
            self.view(self.whole, fqn).copy_(value)
        span = self.span(fqn)
        own = value.reshape(-1)[span.first : span.first + span.numel]
        self.part(self.shard, fqn).copy_(own)
        if self.master is not self.shard:
            self.fragments[fqn].copy_(own)

    @torch.no_grad()
    def cast_masters(self) -> None:
        """Bring the shard up to date with the masters."""
        if self.master is not self.shard:
            self.shard.copy_(self.master)

    def start_gather(self) -> None:
        """Begin to make the buffer whole, unless it is or is about to be. Collective."""
        if self.is_whole or self._work is not None:
            return
        if not self.kind.resident:
            self.whole.untyped_storage().resize_(self.numel * self.kind.compute.itemsize)
        self._work = self.sharding.communication.all_gather(self.whole, self.shard, self.sharding.gather)

    def finish_gather(self) -> None:
        """Wait until the buffer is whole."""
        work, self._work = self._work, None
        if work is not None:
            work.wait()
        if self._lost is not None:
            self._lost.wait()
            self._lost = None
        self.is_whole = True
        self._refusals.end()

    def outdate(self) -> None:
        """The shards have changed: what is whole no longer holds."""
        self.drop_gather()
        self._refusals.written()
        if not self.kind.resident:
            self._free()
        elif not self.shared and self.sharding.world > 1:
            self.is_whole = False

    def release(self) -> None:
        """Free the whole parameters, unless they are resident."""
        if self.kind.resident:
            return
        self.drop_gather()
        self._free()

    def drop_gather(self) -> None:
        """Wait for a gather under way whose result nobody wants."""
        work, self._work = self._work, None
        if work is not None:
            work.wait()
            self.is_whole = True

    def forget_gather(self) -> None:
        """Let go of a gather that may never end: a rank is gone."""
        self._lost, self._work = self._work or self._lost, None

    def _free(self) -> None:
        self._refusals.begin()
        if self._lost is None:
            self.whole.untyped_storage().resize_(0)
        self.is_whole = False
