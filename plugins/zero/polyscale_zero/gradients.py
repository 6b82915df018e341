"""When gradients are added and reduced, and which exist afterwards.

Stage 1 reduces in the last micro-step of an accumulation only; stages 2 and 3 in every micro-step. Inside ``no_sync``
nothing is reduced. What a backward leaves is reduced by ``finish``.

Notable: a buffer is launched when all its parameters have their gradient and all buffers before it are launched, so
ranks that used different parameters reduce in the same order; what is missing at the end of a backward is zero. The
order is the reverse of the modules' at first, then the one in which the first backward completed the buffers, where all
ranks saw the same. A gradient that comes after its buffer was launched (reentrant recompute of a module called twice)
waits for ``finish``, in which ranks agree on what is left. A parameter that no rank used gets no gradient: it does not
move, not even by weight decay.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn

from polyscale._torch import hook_after_accumulation
from polyscale.interfaces.parallelism import Holding, ParallelContext
from polyscale.parameters.usage import UsageAgreement, outside_backward
from polyscale_zero import _torch
from polyscale_zero.common import CommonMemory
from polyscale_zero.flat import Sharding
from polyscale_zero.reduction import FlatGradient, ReductionRule
from polyscale_zero.unit import Unit


class FlatGradients:
    """The gradient synchroniser of zero. See ``GradientSynchronizer`` for the contract.

    Args:
        units: in the order of the modules, the root last.
        elements: name -> what the optimizer updates.
        common: the buffers that are in common memory.
        began: called before every backward. ended: after it.
        overlap: whether reductions run on while backward goes on.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        elements: dict[str, nn.Parameter],
        context: ParallelContext,
        sharding: Sharding,
        common: CommonMemory,
        *,
        began: Callable[[], None],
        ended: Callable[[], None],
        overlap: bool,
    ) -> None:
        self.divisor = context.predivisor
        self._note, self._sharding, self._overlap = context.note, sharding, overlap
        self._began, self._ended = began, ended
        self._everyone = context.topology.group("grad") if context.topology.dp_size > 1 else None
        self._elements = elements
        self._stage = context.config.zero_optimization.stage
        precision = context.precision
        rule = ReductionRule(precision.accumulation, precision.reduction, self.divisor, keep=self._stage == 1)
        trained = [(unit, flat) for unit in units for flat in unit.flats if flat.kind.requires_grad]
        self._buffers = [FlatGradient(flat, rule) for _, flat in trained]
        inner = [unit for unit in units if not unit.is_root] or units
        self._largest = max((sum(f.numel for f in unit.flats if f.kind.requires_grad) for unit in inner), default=0)
        self._order = _first_order(self._buffers, [unit for unit, _ in trained])
        self._of = {fqn: buffer for buffer in self._buffers for fqn in buffer.flat.parameters}
        self._parameters = {fqn: p for buffer in self._buffers for fqn, p in buffer.flat.parameters.items()}
        self._names = [fqn for fqn, p in self._parameters.items() if p.numel()]
        self._usage = UsageAgreement(context, len(self._names) + len(self._buffers))
        self._used: set[str] = set()
        self._missing: dict[FlatGradient, set[str]] = {}
        self._completed: list[FlatGradient] | None = []  # None once the order is settled
        self._flying: list[FlatGradient] = []
        self._next = 0
        self._open = self._reducing = self._given = False
        self._common = common
        self._handles = [hook_after_accumulation(self._parameters[fqn], self._make_hook(fqn)) for fqn in self._names]

    def before_backward(self, *, last: bool, hold: bool) -> None:
        """See the Protocol."""
        self._reducing = not hold and (last or self._stage > 1)
        self._missing = {
            buffer: {fqn for fqn, p in buffer.flat.parameters.items() if p.numel()} for buffer in self._buffers
        }
        self._next = 0
        self._open = True
        if self._given:  # by an early ``finish``
            self._take_back()
        self._began()

    @torch.no_grad()
    def after_backward(self) -> None:
        """See the Protocol."""
        self._open = False
        self._ended()  # first, because ranks that ended elsewhere would wait for one another's reductions
        if self._reducing:
            for buffer in self._order[self._next :]:
                self._launch(buffer)
            self._next = len(self._order)
            self._settle()
        self._reducing = False

    @torch.no_grad()
    def finish(self, equal: Sequence[int] = ()) -> None:
        """See the Protocol."""
        flags = [fqn in self._used for fqn in self._names] + [bool(buffer.filled) for buffer in self._buffers]
        answer = self._usage.exchange(flags, equal, "micro-steps and weights of this accumulation")
        left = [b for b, wanted in zip(self._buffers, answer[len(self._names) :], strict=True) if wanted]
        for buffer in left:
            self._launch(buffer)
        self._settle()
        for fqn, used in zip(self._names, answer, strict=False):
            self._elements[fqn].grad = self._of[fqn].part(fqn) if used else None
        self._given = True
        self._settle_order()
        if self._common.is_used:
            self._common.before_update()

    def clear(self) -> None:
        """See the Protocol."""
        self._settle()
        self._take_back()
        for buffer in self._buffers:
            buffer.clear()
        self._used.clear()

    def recover(self) -> None:
        """Drop what a forward or backward that raised has left: also gradients that no hook has taken."""
        self._open = self._reducing = False
        self._flying.clear()
        for buffer in self._buffers:
            buffer.forget()
        for parameter in self._parameters.values():
            parameter.grad = None
        self._take_back()
        self._used.clear()

    def holdings(self) -> Iterator[Holding]:
        """The whole gradient buffers that there are now."""
        for buffer in self._buffers:
            for tensor in buffer.memory():
                yield Holding("gradient buffers", buffer.flat.name, tensor)

    def close(self) -> None:
        """Remove the hooks and free the buffers."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        for buffer in self._buffers:
            buffer.forget()

    def _make_hook(self, fqn: str) -> Callable[[nn.Parameter], None]:
        buffer = self._of[fqn]

        @torch.no_grad()
        def hook(parameter: nn.Parameter) -> None:
            gradient, parameter.grad = parameter.grad, None
            if gradient is None:
                return
            if not self._open:
                raise outside_backward(fqn)
            if buffer.needs_memory:
                self._make_room()
            if buffer.in_flight and not buffer.needs_memory:  # it is reduced where it is: first come, first settled
                self._settle()
            buffer.add(fqn, _torch.local_gradient(gradient, parameter))
            self._used.add(fqn)
            missing = self._missing[buffer]
            missing.discard(fqn)
            if not missing:
                self._complete(buffer)

        return hook

    def _complete(self, buffer: FlatGradient) -> None:
        if self._completed is not None and buffer not in self._completed:
            self._completed.append(buffer)
        if not self._reducing:
            return
        while self._next < len(self._order) and not self._missing[self._order[self._next]]:
            self._launch(self._order[self._next])
            self._next += 1

    def _launch(self, buffer: FlatGradient) -> None:
        self._note(f"{buffer.flat.name} reduce_scatter")
        if buffer.in_flight:
            self._settle()
        self._make_room(buffer.flat.numel)
        buffer.launch()
        self._flying.append(buffer)
        if not self._overlap:
            self._settle()

    def _settle(self) -> None:
        for buffer in self._flying:
            buffer.settle()
        self._flying.clear()

    def _make_room(self, coming: int = 0) -> None:
        """Wait until at most one unit's worth of gradients is under way, with ``coming`` more elements."""
        while self._flying and sum(buffer.flat.numel for buffer in self._flying) + coming > self._largest:
            self._flying.pop(0).settle()

    def _take_back(self) -> None:
        for fqn in self._names:
            self._elements[fqn].grad = None
        self._given = False

    def _settle_order(self) -> None:
        """After the first accumulation: take the order in which its backward completed, if all ranks saw the same."""
        found, self._completed = self._completed, None
        if found is None or self._sharding.world == 1:
            return
        order = [self._buffers.index(buffer) for buffer in found]
        order += [place for place in range(len(self._buffers)) if place not in order]
        number = zlib.crc32(repr(order).encode()) & 0x7FFFFFFF
        values = torch.tensor([number, -number], dtype=torch.int32).to(self._sharding.device)
        self._sharding.communication.all_reduce(values, self._everyone, op="max").wait_host()
        most, least = values.tolist()
        if most == -least:
            self._order = [self._buffers[place] for place in order]


def _first_order(buffers: list[FlatGradient], units: list[Unit]) -> list[FlatGradient]:
    """Last unit first, and the buffers of the root unit, which is complete when backward ends, at the end."""
    paired = list(zip(buffers, units, strict=True))
    inner = [buffer for buffer, unit in reversed(paired) if not unit.is_root]
    return inner + [buffer for buffer, unit in paired if unit.is_root]
