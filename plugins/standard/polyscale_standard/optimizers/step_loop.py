"""What the optimizers written here share: the loop of one update, and buffers that begin at zero."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class StepLoop(torch.optim.Optimizer):
    """An optimizer that says in :meth:`update` what one update of a group is."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Do one update of every parameter that has a gradient; return what ``closure``, run before it, gave."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        live = [(group, [p for p in group["params"] if p.grad is not None]) for group in self.param_groups]
        self.update_all([(group, params) for group, params in live if params])
        return loss

    def update_all(self, groups: list[tuple[dict[str, Any], list[torch.Tensor]]]) -> None:
        """Update each group with those of its parameters that have a gradient."""
        for group, params in groups:
            self.update(group, params)

    def update(self, group: dict[str, Any], params: list[torch.Tensor]) -> None:
        """Update those parameters of ``group`` that have a gradient: ``params``, at least one."""
        raise NotImplementedError

    def buffers(self, params: list[torch.Tensor], name: str) -> list[torch.Tensor]:
        """The state ``name`` of each parameter, of its shape and dtype; zero before the first update."""
        return [self._buffer(param, name) for param in params]

    def step_counts(self, params: list[torch.Tensor]) -> list[torch.Tensor]:
        """The state ``step`` of each parameter, a 0-dimensional fp32 number on the host; 0 before the first update."""
        for param in params:
            if "step" not in self.state[param]:
                self.state[param]["step"] = torch.zeros((), dtype=torch.float32)
        return [self.state[param]["step"] for param in params]

    def _buffer(self, param: torch.Tensor, name: str) -> torch.Tensor:
        state = self.state[param]
        if name not in state:
            state[name] = torch.zeros_like(param)
        buffer: torch.Tensor = state[name]
        return buffer
