"""Refuses a backward whose forward is older than the parameters.

Notable: flat buffers are written past autograd's version counters, so torch itself would compute wrong gradients
without a word. Every output of the root is tied to a number that changes with the parameters.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import nn

from polyscale.errors import PolyscaleError
from polyscale_zero import _torch
from polyscale_zero.nests import tensors_in


class Epoch:
    """Counts changes of the parameters.

    Attributes:
        number: of changes so far.
    """

    def __init__(self, roots: Iterable[nn.Module]) -> None:
        self.number = 0
        self._handles = [root.register_forward_hook(_torch.not_compiled(self._mark)) for root in roots]

    def advance(self) -> None:
        """The parameters have changed."""
        self.number += 1

    def check(self, number: int) -> None:
        """Refuse a graph that was recorded when the count was ``number``.

        Raises:
            PolyscaleError: it has changed since.
        """
        if number != self.number:
            raise PolyscaleError(
                "A backward whose forward ran before the parameters were last changed",
                why="step(), load() or set_full() has written into the parameters that its graph refers to, so the "
                "gradients would be wrong",
                fix="Call backward(loss) before step(); run the forward again for this loss",
            )

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def _mark(self, _module: nn.Module, _inputs: Any, output: Any) -> None:
        if not torch.is_grad_enabled():
            return
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                _torch.before_gradient(tensor, partial(self.check, self.number))


def explain_outdated(error: Exception) -> PolyscaleError | None:
    """Say what torch's error about versions may mean here; None for any other.

    An output in which nobody finds the tensors is tied to no number, but parameters get new versions when they change.
    """
    if "modified by an inplace operation" not in str(error):
        return None
    return PolyscaleError(
        "A backward through a tensor that was written into after its forward",
        why="step(), load() and set_full() write into the parameters that an older forward refers to, and operators "
        "in place into what they are given",
        fix="Call backward(loss) before step(), or run the forward again for this loss; "
        "torch.autograd.set_detect_anomaly(True) names an operator",
    )
