"""Whether an optimizer step that was interrupted had begun to write.

Notable: no copy is kept, and torch's version counters would not tell: an in-place operation counts when it has ended,
and one over a list of tensors may end in the middle. What is certain is that making states, as torch's optimizers do
in ``_init_group`` before they compute, writes nothing that was there before. An exception from there leaves the update
undone, once the states it has begun to make are taken away; from anywhere else the update counts as begun.
"""

from __future__ import annotations

import torch

from polyscale._torch import makes_states


class Intact:
    """Which states an optimizer had before a step."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._known = {parameter for parameter, state in optimizer.state.items() if state}

    def restore(self, error: BaseException) -> bool:
        """Return whether ``error`` came before anything was written; then take away the states begun."""
        if not makes_states(error, self._optimizer):
            return False
        for parameter in [parameter for parameter in self._optimizer.state if parameter not in self._known]:
            del self._optimizer.state[parameter]
        return True
