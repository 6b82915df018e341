"""Watches the calls of units, and refuses what torch's FSDP2 computes wrongly without a word.

Two things it cannot do, seen with torch 2.13:

- With ``torch.utils.checkpoint(use_reentrant=True)`` each call of a unit is recomputed in a backward of its own. FSDP2
  ends its bookkeeping after the first, so the gradient of any other call of the same unit is lost, recomputed or not,
  in the same forward or in another one before the backward. A reentrant recompute shows itself in forward: the unit
  runs without gradient recording, from an autograd function, inside a forward of the root that records.
- When ranks call different units, their collectives pair up all the same, and weights of one block become those of
  another. The order of calls is condensed to a number that ranks compare at every update.
"""

from __future__ import annotations

import inspect
import weakref
import zlib
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.function import FunctionCtx

from polyscale import _torch
from polyscale.errors import UnsupportedError
from polyscale.interfaces.parallelism import Part


class _Alive:
    """Lives as long as the graph of a forward; a hook of its output holds it."""


def _in_autograd_function() -> bool:
    """Whether this runs inside the forward of an autograd function, as a reentrant recompute does."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_name == "forward" and isinstance(frame.f_locals.get("ctx"), FunctionCtx):
            return True
        frame = frame.f_back
    return False


def _keep(_alive: _Alive, _gradient: torch.Tensor) -> None:
    """Do nothing, but hold ``_alive`` as long as the graph holds this hook."""


class UnitCalls:
    """Counts the calls of every unit between backwards.

    Attributes:
        order: a number that tells the sequence of calls since ``clear``.
    """

    def __init__(self, parts: list[Part], note: Callable[[str], None]) -> None:
        from torch.distributed.fsdp import FSDPModule

        self.order = 0
        self._note = note
        self._recording = False
        self._calls: Counter[str] = Counter()
        self._hidden: Counter[str] = Counter()
        self._graph: weakref.ref[_Alive] | None = None
        self._handles: list[Any] = []
        for part in parts:
            root: Any = part.module
            self._handles.append(root.register_forward_pre_hook(self._begin, prepend=True))
            self._handles.append(root.register_forward_hook(self._end))
            for name, module in part.module.named_modules():
                if name and isinstance(module, FSDPModule):
                    unit: Any = module
                    self._handles.append(unit.register_forward_pre_hook(self._make_check(name), prepend=True))

    def after_backward(self) -> None:
        """A backward has used up the graphs: calls before it no longer matter."""
        self._calls.clear()
        self._hidden.clear()
        self._graph = None

    def clear(self) -> None:
        """Start the sequence of calls anew."""
        self.order = 0

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _begin(self, _module: nn.Module, _inputs: Any) -> None:
        self._recording = torch.is_grad_enabled()
        if self._graph is None or self._graph() is None:
            self.after_backward()  # an earlier forward, if any, was thrown away

    def _end(self, _module: nn.Module, _inputs: Any, output: Any) -> None:
        if self._recording:
            alive = _Alive()
            for tensor in _torch.tree_leaves(output):
                if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                    _torch.hook_gradient(tensor, partial(_keep, alive))
            self._graph = weakref.ref(alive)
        self._recording = False

    def _make_check(self, name: str) -> Any:
        tag = name.encode()

        def check(_module: nn.Module, _inputs: Any) -> None:
            self._note(f"{name} all_gather")
            if _torch.in_backward():
                return
            # 31 bits, because ranks compare it as an int32.
            self.order = zlib.crc32(tag, self.order) & 0x7FFFFFFF
            if not self._recording:
                return
            self._calls[name] += 1
            if not torch.is_grad_enabled():
                if not _in_autograd_function():
                    self._calls[name] -= 1  # a pass under no_grad has no gradient to lose
                    return
                self._hidden[name] += 1
            if self._hidden[name] and self._calls[name] > 1:
                self._refuse(name)

        return check

    def _refuse(self, name: str) -> None:
        raise UnsupportedError(
            f"Unit {name!r} is called {self._calls[name]} times before a backward, with reentrant recompute",
            why="torch's FSDP2 would silently lose the gradient of all calls but one",
            fix="Use torch.utils.checkpoint.checkpoint(..., use_reentrant=False), or zero_optimization.stage 0",
        )


def second_derivative() -> UnsupportedError:
    """The error for a backward that records a graph of its own."""
    return UnsupportedError(
        "A backward through a backward (create_graph=True) over sharded parameters",
        why="fsdp2 frees whole parameters after the first backward, and the second needs them",
        fix="Use zero_optimization.stage 0 for gradient penalties and other second derivatives",
    )
