"""The store of ddp: every rank holds every master whole (or its part on model-parallel axes)."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from polyscale.interfaces.checkpoint import Box
from polyscale.interfaces.optimizer import Granularity
from polyscale.interfaces.parallelism import ParallelContext, Part
from polyscale.parameters.boxes import model_parallel_region
from polyscale.parameters.info import ParamInfo
from polyscale.parameters.inspect import as_dtensor
from polyscale.parameters.sharded_store import ShardedStore


class ReplicatedStore(ShardedStore):
    """Masters are the module's parameters, or separate fp32 copies where those compute in 16 bits."""

    def __init__(
        self,
        parts: list[Part],
        infos: dict[str, ParamInfo],
        masters: dict[str, nn.Parameter],
        elements: dict[str, nn.Parameter],
        computed: dict[str, nn.Parameter],
        context: ParallelContext,
    ) -> None:
        super().__init__(parts, infos, context)
        self._masters = masters
        self._elements = elements
        self._computed = computed

    def optimizer_parameter(self, fqn: str, granularity: Granularity) -> nn.Parameter:
        """See the Protocol: the master; its local part where it is a DTensor and elements are asked for."""
        return self._masters[fqn] if granularity == "tensor" else self._elements[fqn]

    def assemble(self, fqn: str, local: torch.Tensor) -> torch.Tensor:
        """See the Protocol."""
        whole = as_dtensor(local, self._masters[fqn])
        full: torch.Tensor = local if whole is local else whole.full_tensor()
        return full.clone() if full.data_ptr() == local.data_ptr() else full

    def extract(self, fqn: str, full: torch.Tensor) -> torch.Tensor:
        """See the Protocol."""
        return model_parallel_region(self.infos[fqn]).cut(full)

    def fragments(self, fqn: str, local: torch.Tensor) -> tuple[Box, ...]:
        """See the Protocol: one box; of its copies, the lowest data-parallel rank owns it."""
        region = model_parallel_region(self.infos[fqn])
        topology = self._topology
        replicas = self.infos[fqn].mesh is None and topology.model_rank != 0
        return (Box(region.offsets, local, region.owner and topology.dp_rank == 0 and not replicas),)

    @torch.no_grad()
    def written(self, names: Iterable[str] | None = None) -> None:
        """See the Protocol: masters are cast into the parameters that compute."""
        for fqn in self._masters if names is None else map(self.canonical, names):
            if self._computed[fqn] is not self._masters[fqn]:
                self._computed[fqn].data.copy_(self._masters[fqn].data)
