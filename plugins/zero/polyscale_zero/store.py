"""The store of zero: every parameter is a range of a flat shard.

Notable: optimizers of every granularity are given this rank's part as a 1-D tensor; norms and whole matrices go through
the store. In a checkpoint a range of a tensor is a few boxes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn

from polyscale.interfaces.checkpoint import Box
from polyscale.interfaces.optimizer import Granularity
from polyscale.interfaces.parallelism import ParallelContext, Part
from polyscale.parameters.boxes import model_parallel_region, range_boxes
from polyscale.parameters.info import ParamInfo
from polyscale.parameters.inspect import as_dtensor
from polyscale.parameters.sharded_store import ShardedStore
from polyscale_zero.common import CommonMemory
from polyscale_zero.flat import Flat, Sharding


class FlatStore(ShardedStore):
    """Masters are ranges of flat shards.

    Args:
        flats: all buffers.
        elements: name -> what the optimizer updates: a view of a master.
        sharding: over which ranks.
        changed: called when whole parameters are about to change.
        common: the buffers that are in common memory.
    """

    flat = True

    def __init__(
        self,
        parts: list[Part],
        infos: dict[str, ParamInfo],
        context: ParallelContext,
        flats: Sequence[Flat],
        elements: dict[str, nn.Parameter],
        *,
        sharding: Sharding,
        changed: Callable[[], None],
        common: CommonMemory,
    ) -> None:
        super().__init__(parts, infos, context)
        self._common = common
        self._flats, self._elements, self._sharding, self._changed = flats, elements, sharding, changed
        self._of = {fqn: flat for flat in flats for fqn in flat.parameters}

    def optimizer_parameter(self, fqn: str, granularity: Granularity) -> nn.Parameter:
        """See the Protocol: this rank's part, 1-D, for every granularity."""
        return self._elements[fqn]

    def canonical(self, name: str | nn.Parameter) -> str:
        """See the Protocol; the parameters themselves are known while ``gathered`` has copies in their places."""
        if not isinstance(name, str):
            for fqn, flat in self._of.items():
                if flat.parameters[fqn] is name:
                    return fqn
        return super().canonical(name)

    def assemble(self, fqn: str, local: torch.Tensor) -> torch.Tensor:
        """See the Protocol."""
        flat = self._of[fqn]
        whole = self._join(fqn, local).view(flat.layout.slots[fqn].shape)
        distributed = as_dtensor(whole, flat.parameters[fqn])
        return whole if distributed is whole else distributed.full_tensor()  # type: ignore[no-any-return]

    def extract(self, fqn: str, full: torch.Tensor) -> torch.Tensor:
        """See the Protocol."""
        span = self._of[fqn].span(fqn)
        block = model_parallel_region(self.infos[fqn]).cut(full)
        return block.reshape(-1)[span.first : span.first + span.numel]

    def fragments(self, fqn: str, local: torch.Tensor) -> tuple[Box, ...]:
        """See the Protocol: the boxes of a range; the first replica owns them."""
        flat, region, topology = self._of[fqn], model_parallel_region(self.infos[fqn]), self._topology
        span = flat.span(fqn)
        copies = topology.coordinate("dp_replicate")
        model_copies = topology.model_rank if self.infos[fqn].mesh is None else 0
        owner = region.owner and copies == 0 and model_copies == 0
        if flat.layout.slots[fqn].numel == 0:
            empty = local.reshape(region.sizes)
            return (Box(region.offsets, empty, owner and self._sharding.rank == 0),)
        found = []
        for box in range_boxes(region.sizes, span.first, span.first + span.numel):
            offsets = tuple(a + b for a, b in zip(region.offsets, box.offsets, strict=True))
            start = box.start - span.first
            found.append(Box(offsets, local[start : start + box.numel].view(box.sizes), owner))
        return tuple(found)

    def set_full(self, fqn: str, value: torch.Tensor, kind: str = "parameter") -> None:
        """See the Protocol; other ranks may still compute with what is in common memory."""
        if kind == "parameter" and self._common.is_used:
            self._common.before_update()
        super().set_full(fqn, value, kind)

    @torch.no_grad()
    def written(self, names: Iterable[str] | None = None) -> None:
        """See the Protocol: masters are cast into the shards; what stays whole is gathered again."""
        touched = self._flats if names is None else list({id(f): f for f in map(self._flat_of, names)}.values())
        self._changed()
        for flat in touched:
            flat.outdate()
            flat.cast_masters()
        if self._common.is_used:
            self._common.after_update(None if names is None else [self.canonical(name) for name in names])
        resident = [flat for flat in touched if flat.kind.resident]
        for flat in resident:
            flat.start_gather()
        for flat in resident:
            flat.finish_gather()

    def _flat_of(self, name: str) -> Flat:
        return self._of[self.canonical(name)]

    def _join(self, fqn: str, local: torch.Tensor) -> torch.Tensor:
        """The whole flattened parameter (before model-parallel axes are joined), of which each rank has a part."""
        flat, world = self._of[fqn], self._sharding.world
        if world == 1:
            return local.clone()
        spans = [flat.span(fqn, rank) for rank in range(world)]
        longest = max(span.numel for span in spans)
        if longest == 0:
            return local.clone()
        own = local.new_zeros(longest)
        own[: local.numel()].copy_(local)
        joined = local.new_empty(world * longest)
        self._communication.all_gather(joined, own, self._sharding.gather).wait()
        return torch.cat([joined[r * longest : r * longest + span.numel] for r, span in enumerate(spans)])
