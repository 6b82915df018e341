"""Stage 3: units are whole while they run, in forward and in backward, and the next one is gathered meanwhile.

Notable: a unit is gathered before its forward and before the gradient of any of its outputs is used, and freed after
its forward and once the gradients of all its inputs are there. Both hooks of backward sit on graph nodes (``_torch``),
so nothing is copied and in-place operators do not lose them. What a backward does not reach is freed at its end. The
root unit stays whole from forward to the end of backward; where something has freed it meanwhile, it is gathered when
backward begins. A recompute inside a backward is a visit like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from polyscale._torch import in_backward
from polyscale_zero import _torch
from polyscale_zero.agreement import VisitAgreement
from polyscale_zero.nests import awaited, tensors_in, without_memory_of
from polyscale_zero.order import VisitOrder
from polyscale_zero.released import second_derivative
from polyscale_zero.unit import Unit


@dataclass(frozen=True)
class Limits:
    """How much may be whole, in elements.

    Attributes:
        ahead: gathered ahead of the unit that runs; None: one unit.
        live: whole at a time, ahead included.
        reuse: a unit that runs again within so many elements stays whole.
    """

    ahead: int | None
    live: int
    reuse: int


class _Call:
    """One call of a unit in a forward that records: its inputs, and how many of them wait for their gradients."""

    def __init__(self) -> None:
        self.inputs = self.waiting = 0

    def expect(self) -> None:
        """Count an input."""
        self.inputs += 1


class Gathering:
    """Gathers and frees units as they are visited.

    Args:
        units: all of them; a unit's number is its place.
        agreement: compares the ranks' visits.
        stale: raises when a graph is older than the parameters.
        epoch: a number that changes with the parameters.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        agreement: VisitAgreement,
        limits: Limits,
        note: Callable[[str], None],
        *,
        epoch: Callable[[], int],
        stale: Callable[[int], None],
    ) -> None:
        self._units, self._agreement, self._limits, self._note = units, agreement, limits, note
        self._epoch, self._stale = epoch, stale
        self._orders = {True: VisitOrder(), False: VisitOrder()}
        self._recording = True
        self._calls: dict[int, list[_Call]] = {}
        self._active: dict[int, set[_Call]] = {}
        self._handles: list[Any] = []
        for number, unit in enumerate(units):
            enter, leave = partial(self._enter, number), partial(self._leave, number)
            self._handles += [
                unit.module.register_forward_pre_hook(_torch.not_compiled(enter), prepend=True, with_kwargs=True),
                unit.module.register_forward_hook(_torch.not_compiled(leave), with_kwargs=True),
            ]

    def begin_backward(self) -> None:
        """A backward is about to run. Collective."""
        self._active.clear()
        for number, unit in enumerate(self._units):
            if unit.is_root:
                self._visit(number, "backward")

    def end_backward(self) -> None:
        """A backward is over: free everything."""
        self._agreement.compare(0, "the end of backward")
        self._orders[True].end()
        self.free()

    def free(self) -> None:
        """Free every unit."""
        self._calls.clear()
        self._active.clear()
        for unit in self._units:
            unit.release()

    def recover(self) -> None:
        """After an exception: let go of gathers that may never end, and free everything."""
        self._agreement.forget()
        for unit in self._units:
            for flat in unit.flats:
                flat.forget_gather()
        self.free()

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    # Forward.

    def _enter(self, number: int, _module: nn.Module, args: Any, kwargs: Any) -> Any:
        unit = self._units[number]
        if unit.is_root and not in_backward():
            self._recording = torch.is_grad_enabled()
        if in_backward():
            self._visit(number, "backward", again=bool(self._active.get(number)))
        else:
            self._visit(number, "forward")
        if unit.is_root or not torch.is_grad_enabled():
            return None
        call = _Call()
        self._calls.setdefault(number, []).append(call)
        return awaited((args, kwargs), call.expect, partial(self._leave_backward, number, call))

    def _leave(self, number: int, _module: nn.Module, _args: Any, _kwargs: Any, output: Any) -> Any:
        unit = self._units[number]
        output = without_memory_of(unit.addresses, output, unit.label)
        recording = torch.is_grad_enabled()
        if recording:
            waiting = self._calls.get(number)
            call = waiting.pop() if waiting else _Call()
            for tensor in tensors_in(output):
                if tensor.requires_grad:
                    _torch.before_gradient(tensor, partial(self._enter_backward, number, call, self._epoch()))
        if in_backward() or (unit.is_root and recording):
            return output
        if unit.is_root:
            self._orders[False].end()
            self._agreement.settle()
            self.free()
        elif not self._active.get(number) and not self._is_soon_again(number):
            unit.release()
        return output

    # Backward.

    def _enter_backward(self, number: int, call: _Call, epoch: int) -> None:
        self._stale(epoch)
        if torch.is_grad_enabled():
            raise second_derivative()
        active = self._active.setdefault(number, set())
        again = call in active  # by another of its outputs
        if not again:
            active.add(call)
            call.waiting = call.inputs
        self._visit(number, "backward", again=again)

    def _leave_backward(self, number: int, call: _Call) -> None:
        call.waiting -= 1
        active = self._active.get(number, set())
        if call.waiting > 0 or call not in active:
            return
        active.discard(call)
        if not active and not self._is_soon_again(number):
            self._units[number].release()

    # Both.

    def _visit(self, number: int, phase: str, *, again: bool = False) -> None:
        """Make a unit whole; ``again``: the same visit goes on.

        Ranks compare also where it is whole already, because what they gather ahead follows from their visits.
        """
        unit = self._units[number]
        if not unit.is_ready or (unit.freed and not unit.is_root and not again):
            foreseen = all(flat.is_whole or flat.pending for flat in unit.freed)
            self._agreement.compare(number, phase, at_once=not foreseen)
        if not unit.is_ready:
            unit.start_gather(self._note)
            unit.finish_gather()
        if unit.is_root or again:
            return
        order = self._orders[self._recording]
        order.visit(number)
        self._gather_ahead(order)

    def _gather_ahead(self, order: VisitOrder) -> None:
        live = sum(unit.freed_numel for unit in self._units if not unit.is_root and self._has_memory(unit))
        ahead = 0
        for number in order.upcoming():
            unit = self._units[number]
            if not unit.freed:
                continue
            if self._has_memory(unit):
                if self._limits.ahead is None:
                    return
                continue
            ahead += unit.freed_numel
            live += unit.freed_numel
            if live > self._limits.live or (self._limits.ahead is not None and ahead > self._limits.ahead):
                return
            unit.start_gather(self._note)
            if self._limits.ahead is None:
                return

    @staticmethod
    def _has_memory(unit: Unit) -> bool:
        return any(flat.is_whole or flat.pending for flat in unit.freed)

    def _is_soon_again(self, number: int) -> bool:
        """Whether the unit runs again within ``limits.reuse`` elements: at least, next of all."""
        distance = 0
        for following in self._orders[self._recording].upcoming():
            if following == number:
                return True
            distance += self._units[following].freed_numel
            if distance > self._limits.reuse:
                return False
        return False
