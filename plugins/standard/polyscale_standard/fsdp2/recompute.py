"""Refuses what torch's FSDP2 computes wrongly without a word: reentrant recompute of a unit that is called twice.

With ``torch.utils.checkpoint(use_reentrant=True)`` each call of a unit is recomputed in a backward of its own. FSDP2
ends its bookkeeping after the first of them, and the gradient of the other call is lost (seen with torch 2.13). A
reentrant recompute shows itself in forward: the unit runs without gradient recording inside a forward that records.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import nn

from polyscale import _torch
from polyscale.errors import UnsupportedError
from polyscale.interfaces.parallelism import Part


def refuse_lost_gradients(parts: list[Part]) -> list[Any]:
    """Install the guards; returns handles to remove them."""
    from torch.distributed.fsdp import FSDPModule

    handles: list[Any] = []
    for part in parts:
        guard = _Guard()
        handles.append(part.module.register_forward_pre_hook(guard.begin, prepend=True))
        for name, module in part.module.named_modules():
            if name and isinstance(module, FSDPModule):
                handles.append(module.register_forward_pre_hook(guard.make_check(name), prepend=True))  # type: ignore[attr-defined]
    return handles


class _Guard:
    """Counts the calls of each unit that run without recording inside a forward of the root that records."""

    def __init__(self) -> None:
        self._recording = False
        self._hidden: Counter[str] = Counter()

    def begin(self, _module: nn.Module, _inputs: Any) -> None:
        self._recording = torch.is_grad_enabled()
        self._hidden.clear()

    def make_check(self, name: str) -> Any:
        def check(_module: nn.Module, _inputs: Any) -> None:
            if not self._recording or torch.is_grad_enabled() or _torch.in_backward():
                return
            self._hidden[name] += 1
            if self._hidden[name] > 1:
                self._refuse(name)

        return check

    def _refuse(self, name: str) -> None:
        raise UnsupportedError(
            f"Unit {name!r} is called {self._hidden[name]} times under reentrant activation recompute",
            why="torch's FSDP2 would silently lose the gradient of all calls but one",
            fix="Use torch.utils.checkpoint.checkpoint(..., use_reentrant=False), or zero_optimization.stage 0",
        )
