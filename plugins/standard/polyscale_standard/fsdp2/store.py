"""The store of fsdp2: parameters are DTensors; optimizers that work element by element get their local shards."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from polyscale import _torch
from polyscale.interfaces.checkpoint import Box
from polyscale.interfaces.optimizer import Granularity
from polyscale.interfaces.parallelism import ParallelContext, Part
from polyscale.parameters.boxes import Region, model_parallel_region
from polyscale.parameters.info import ParamInfo
from polyscale.parameters.inspect import as_dtensor
from polyscale.parameters.sharded_store import ShardedStore, local_tensor


class DTensorStore(ShardedStore):
    """Masters are the sharded parameters themselves: FSDP2 casts when it gathers.

    Attributes:
        sharded: name -> the module's parameter (a DTensor, or a tensor that stays whole).
    """

    def __init__(
        self, parts: list[Part], infos: dict[str, ParamInfo], sharded: dict[str, nn.Parameter], context: ParallelContext
    ) -> None:
        super().__init__(parts, infos, context)
        self._parts = parts
        self.sharded = sharded
        self._elements = {
            fqn: nn.Parameter(local_tensor(parameter.data), requires_grad=parameter.requires_grad)
            if self.is_sharded(fqn)
            else parameter
            for fqn, parameter in sharded.items()
        }

    def is_sharded(self, fqn: str) -> bool:
        """Whether ``fully_shard`` took the parameter."""
        return hasattr(self.sharded[fqn], "device_mesh") and self.sharded[fqn].dim() > 0

    def trainable(self, fqn: str) -> bool:
        """Whether there is anything to train: an empty parameter has no elements."""
        return self.sharded[fqn].numel() > 0

    def take_gradient(self, fqn: str, *, used: bool) -> None:
        """Hand the reduced gradient to the local shard, or drop it everywhere when no rank used the parameter."""
        parameter, element = self.sharded[fqn], self._elements[fqn]
        if not used:
            parameter.grad = None
        element.grad = None if parameter.grad is None else local_tensor(parameter.grad)

    def optimizer_parameter(self, fqn: str, granularity: Granularity) -> nn.Parameter:
        """See the Protocol: local shards, but DTensors for optimizers that need norms of whole tensors."""
        return self.sharded[fqn] if granularity == "tensor" else self._elements[fqn]

    def assemble(self, fqn: str, local: torch.Tensor) -> torch.Tensor:
        """See the Protocol."""
        whole = as_dtensor(local, self.sharded[fqn])
        full: torch.Tensor = local if whole is local else whole.full_tensor()
        # In a world of 1 the whole tensor is the local one; callers are promised a copy.
        return full.clone() if full.data_ptr() == local.data_ptr() else full

    def extract(self, fqn: str, full: torch.Tensor) -> torch.Tensor:
        """See the Protocol."""
        return self._region(fqn).cut(full)

    def fragments(self, fqn: str, local: torch.Tensor) -> tuple[Box, ...]:
        """See the Protocol: one box, owned by the first replica."""
        region = self._region(fqn)
        topology = self._topology
        copies = topology.coordinate("dp_replicate") if self.is_sharded(fqn) else topology.dp_rank
        model_copies = topology.model_rank if self.infos[fqn].mesh is None else 0
        return (Box(region.offsets, local, region.owner and copies == 0 and model_copies == 0),)

    def written(self, names: Iterable[str] | None = None) -> None:
        """See the Protocol: masters are what FSDP2 gathers from, but a forward without backward may have left whole
        parameters behind (stages 1 and 2 keep them), which would now be stale."""
        for part in self._parts:
            _torch.fsdp_reshard(part.module)

    def _region(self, fqn: str) -> Region:
        region = model_parallel_region(self.infos[fqn])
        if not self.is_sharded(fqn):
            return region
        topology = self._topology
        return region.chunk(0, topology.coordinate("dp_shard"), topology.size("dp_shard"))
