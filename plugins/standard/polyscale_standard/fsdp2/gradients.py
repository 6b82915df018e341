"""When ranks communicate under fsdp2, and which gradients exist afterwards.

Stage 1 reduces in the last micro-step of an accumulation only, and keeps parameters whole from the first forward to the
last backward of it. Stages 2 and 3 reduce in every micro-step. Inside ``no_sync`` nothing is reduced; what was held is
reduced by ``finish``.

Notable: every unit always reduces all its trainable parameters (zeros for those without a gradient), so ranks that used
different parameters still reduce equal sizes. Which parameters had a gradient is recorded before that, agreed by one
small all-reduce per update, and a parameter used nowhere gets no gradient: it does not move, not even by weight decay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from polyscale import _torch
from polyscale.errors import UnsupportedError
from polyscale.interfaces.parallelism import ParallelContext, Part
from polyscale.parameters.usage import UsageAgreement, outside_backward
from polyscale_standard.fsdp2.calls import UnitCalls, second_derivative
from polyscale_standard.fsdp2.store import DTensorStore


class ShardedGradients:
    """The gradient synchroniser of fsdp2. See ``GradientSynchronizer`` for the contract."""

    def __init__(self, parts: list[Part], store: DTensorStore, context: ParallelContext, calls: UnitCalls) -> None:
        self.divisor = context.predivisor
        self._parts = parts
        self._store = store
        self._calls = calls
        self._communication = context.communication
        self._group = context.topology.group("grad") if context.topology.dp_size > 1 else None
        self._alone = context.topology.dp_size == 1
        self._stage = context.config.zero_optimization.stage
        self._syncing = True
        self._resharding = True
        self._held = self._open = False
        self._ended = 0
        self._names = [fqn for fqn, info in store.infos.items() if info.requires_grad and store.trainable(fqn)]
        self._used: set[str] = set()
        self._reduced_whole: dict[str, torch.Tensor] = {}
        self._usage = UsageAgreement(context, len(self._names))
        self._units = [unit for part in parts for unit in _torch.fsdp_units(part.module)]
        by_parameter = {id(store.sharded[fqn]): fqn for fqn in self._names}
        for unit in self._units:
            self._watch(unit, by_parameter, context)
        self._whole = [fqn for fqn in self._names if not store.is_sharded(fqn)]
        self._ending = 0
        self._handles = [
            _torch.hook_after_accumulation(store.sharded[fqn], self._make_refusal(fqn))
            for fqn in self._names
            if store.is_sharded(fqn)
        ]

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
        self._open = True
        self._ended = 0

    @torch.no_grad()
    def after_backward(self) -> None:
        """See the Protocol."""
        self._calls.after_backward()
        if self._ended == 0:
            # FSDP2 finds the end of backward through the tensors in the root's output. A model of one unit that
            # returns an object torch cannot look into leaves it without an end: it is brought about here.
            self._end_backward()
        self._open = False

    @torch.no_grad()
    def finish(self, equal: Sequence[int] = ()) -> None:
        """See the Protocol."""
        if self._held:
            self._held = False
            self._syncing = self._resharding = True
            for part in self._parts:
                module: Any = part.module
                module.set_requires_gradient_sync(True)
                module.set_reshard_after_backward(True)
            self._end_backward()
        self._used.update(fqn for fqn in self._whole if self._store.sharded[fqn].grad is not None)
        flags = [fqn in self._used for fqn in self._names]
        answer = self._usage.exchange(
            flags, (*equal, self._calls.order), "micro-steps, weights and units called in this accumulation"
        )
        used = {fqn for fqn, anywhere in zip(self._names, answer, strict=True) if anywhere}
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
        self._reduced_whole.clear()
        self._calls.clear()
        self._held = False

    def recover(self) -> None:
        """Drop what a forward or backward that raised has left."""
        self._open = False
        for part in self._parts:
            _torch.fsdp_reset_after_error(part.module)
        self._calls.after_backward()
        self.clear()

    def close(self) -> None:
        """Let go of the units."""
        for unit in self._units:
            vars(unit).pop("post_backward", None)
        for handle in self._handles:
            handle.remove()
        self._units, self._handles = [], []

    def _end_backward(self) -> None:
        self._open = True
        for part in self._parts:
            _torch.fsdp_end_backward(part.module)
        self._open = False

    def _reduce_whole(self, used: set[str]) -> None:
        """Sum the gradients of the parameters that stay whole; those reduced by an earlier ``finish`` are added."""
        for fqn in self._whole:
            parameter = self._store.sharded[fqn]
            if fqn not in used or self._alone:
                continue
            fresh = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.div_(self.divisor)
            if fqn in self._reduced_whole and parameter.grad is not None:
                fresh = fresh - self._reduced_whole[fqn] / self.divisor
            self._communication.all_reduce(fresh, self._group).wait()
            total = fresh + self._reduced_whole[fqn] if fqn in self._reduced_whole else fresh
            self._reduced_whole[fqn] = total
            parameter.grad = total.clone()

    def _watch(self, unit: Any, names: dict[int, str], context: ParallelContext) -> None:
        """Record which parameters of ``unit`` have a gradient whenever its backward ends, then let FSDP2 go on."""
        original: Callable[..., None] = unit.post_backward
        # Taken out of the context, which holds recordings of starting values that must not live on.
        accumulation, note = context.precision.accumulation, context.note
        members = [
            (inner, names[id(parameter)])
            for inner, parameter in _torch.fsdp_unit_parameters(unit)
            if id(parameter) in names
        ]
        label = f"reduce_scatter of the unit of {members[0][1]}" if members else "end of a frozen unit"

        def post_backward(*unused: Any) -> None:
            if not self._open and members:
                self.recover()
                raise second_derivative() if torch.is_grad_enabled() else outside_backward(members[0][1])
            note(label)
            self._ended += 1
            for inner, fqn in members:
                if fqn not in self._used and _torch.fsdp_has_gradient(inner):
                    self._used.add(fqn)
            if unit.reduce_grads:
                _torch.fsdp_prepare_reduction(unit, divisor=self.divisor)
            else:
                _torch.fsdp_hold(unit, accumulation)
            self._ending += 1
            try:
                original(*unused)
            finally:
                self._ending -= 1

        unit.post_backward = post_backward

    def _make_refusal(self, fqn: str) -> Callable[[nn.Parameter], None]:
        """Refuse a gradient that autograd brings to a shard itself, past the reduction.

        A term like ``parameter.full_tensor().square().sum()`` in the loss makes one: each rank would keep its own, and
        the average over ranks would be of another size than that of all other gradients.
        """

        def hook(_parameter: nn.Parameter) -> None:
            if self._ending == 0:  # FSDP2 runs the same hooks when it stores what it has reduced
                raise UnsupportedError(
                    f"The loss uses the sharded parameter {fqn!r} directly",
                    why="such a gradient is not summed over ranks as all others are",
                    fix="Use the parameter inside the forward of its module, where it is whole (weight decay belongs "
                    "to the optimizer), or zero_optimization.stage 0",
                )

        return hook
