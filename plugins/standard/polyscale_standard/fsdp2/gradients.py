"""When ranks communicate under fsdp2, and which gradients exist afterwards.

Stage 1 reduces in the last micro-step of an accumulation only, and keeps parameters whole from the first forward to the
last backward of it. Stages 2 and 3 reduce in every micro-step. Inside ``no_sync`` nothing is reduced; what was held is
reduced by ``finish``.

Notable: every unit always reduces all its trainable parameters (zeros for those without a gradient), so ranks that used
different parameters still reduce equal sizes. Which parameters had a gradient is recorded before that, agreed by one
small all-reduce per update, and a parameter used nowhere gets no gradient: it does not move, not even by weight decay.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from polyscale import _torch
from polyscale.interfaces.parallelism import ParallelContext, Part
from polyscale_standard.fsdp2.store import DTensorStore


class ShardedGradients:
    """The gradient synchroniser of fsdp2. See ``GradientSynchronizer`` for the contract."""

    def __init__(self, parts: list[Part], store: DTensorStore, context: ParallelContext) -> None:
        self.divisor = float(context.config.gradient_predivide_factor) if context.config.prescale_gradients else 1.0
        self._parts = parts
        self._store = store
        self._topology, self._communication = context.topology, context.communication
        self._device = context.device
        self._stage = context.config.zero_optimization.stage
        self._syncing = True
        self._resharding = True
        self._held = False
        self._names = [fqn for fqn, info in store.infos.items() if info.requires_grad and store.trainable(fqn)]
        self._used: set[str] = set()
        self._units = [unit for part in parts for unit in _torch.fsdp_units(part.module)]
        by_parameter = {id(store.sharded[fqn]): fqn for fqn in self._names}
        for unit in self._units:
            _watch(unit, by_parameter, self._used)
        self._whole = [fqn for fqn in self._names if not store.is_sharded(fqn)]

    def before_backward(self, *, last: bool, hold: bool) -> None:
        """See the Protocol."""
        sync = not hold and (last or self._stage != 1)
        reshard = last or self._stage != 1
        for part in self._parts:
            module: Any = part.module
            if sync != self._syncing:
                module.set_requires_gradient_sync(sync)
            if reshard != self._resharding:
                module.set_reshard_after_backward(reshard)
        self._syncing, self._resharding = sync, reshard
        # A reduction includes what earlier micro-steps held, so only a held backward leaves work for ``finish``.
        self._held = not sync

    def after_backward(self) -> None:
        """See the Protocol."""

    @torch.no_grad()
    def finish(self) -> None:
        """See the Protocol."""
        if self._held:
            for part in self._parts:
                module: Any = part.module
                module.set_requires_gradient_sync(True)
                module.set_reshard_after_backward(True)
                _torch.fsdp_reduce_held(part.module)
            self._syncing = self._resharding = True
            self._held = False
        used = self._agree()
        self._reduce_whole(used)
        for fqn in self._names:
            self._store.take_gradient(fqn, used=fqn in used)

    def clear(self) -> None:
        """See the Protocol."""
        for unit in self._units:
            _torch.fsdp_drop_gradients(unit)
        for fqn in self._names:
            self._store.take_gradient(fqn, used=False)
        self._used.clear()
        self._held = False

    def recover(self) -> None:
        """Drop what a forward or backward that raised has left."""
        for part in self._parts:
            _torch.fsdp_reset_after_error(part.module)
        self.clear()

    def close(self) -> None:
        """Let go of the units."""
        for unit in self._units:
            vars(unit).pop("post_backward", None)
        self._units = []

    def _agree(self) -> set[str]:
        """Return the parameters that had a gradient on any data-parallel rank."""
        self._used.update(fqn for fqn in self._whole if self._store.sharded[fqn].grad is not None)
        if self._topology.dp_size == 1:
            return set(self._used)
        flags = torch.tensor([fqn in self._used for fqn in self._names], dtype=torch.int32)
        flags = flags.to(self._device)
        group = self._topology.group("grad")
        self._communication.all_reduce(flags, group, op="max").wait_host()
        return {fqn for fqn, used in zip(self._names, flags.tolist(), strict=True) if used}

    def _reduce_whole(self, used: set[str]) -> None:
        """Sum the gradients of the parameters that stay whole."""
        if self._topology.dp_size == 1:
            return
        group = self._topology.group("grad")
        for fqn in self._whole:
            if fqn in used:
                parameter = self._store.sharded[fqn]
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                parameter.grad.div_(self.divisor)
                self._communication.all_reduce(parameter.grad, group).wait()


def _watch(unit: Any, names: dict[int, str], used: set[str]) -> None:
    """Record which parameters of ``unit`` have a gradient whenever its backward ends, then let FSDP2 go on."""
    original: Callable[..., None] = unit.post_backward
    members = [
        (inner, names[id(parameter)])
        for inner, parameter in _torch.fsdp_unit_parameters(unit)
        if id(parameter) in names
    ]

    def post_backward(*unused: Any) -> None:
        for inner, fqn in members:
            if fqn not in used and _torch.fsdp_has_gradient(inner):
                used.add(fqn)
        if unit.reduce_grads:
            _torch.fsdp_prepare_reduction(unit)
        original(*unused)

    unit.post_backward = post_backward
