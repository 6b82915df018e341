"""The optimizer class of Lion. Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms", Algorithm 2."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from polyscale._torch import foreach


class Lion(torch.optim.Optimizer):
    """Updates every element by itself; its momentum ``exp_avg`` is shaped like the parameter."""

    granularity = "element"

    def __init__(self, params: list[Any], *, lr: float, betas: tuple[float, float], weight_decay: float) -> None:
        """``betas``: of the interpolation whose sign is the update, and of the momentum."""
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Do one update of every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            if params:
                self._update(group, params)
        return loss

    def _update(self, group: dict[str, Any], params: list[torch.Tensor]) -> None:
        grads = [param.grad for param in params]
        momenta = [self._momentum(param) for param in params]
        beta1, beta2 = group["betas"]
        direction = foreach("mul")(momenta, beta1)
        foreach("add_")(direction, grads, alpha=1 - beta1)
        foreach("sign_")(direction)
        if group["weight_decay"]:
            foreach("mul_")(params, 1 - group["lr"] * group["weight_decay"])
        foreach("add_")(params, direction, alpha=-group["lr"])
        foreach("mul_")(momenta, beta2)
        foreach("add_")(momenta, grads, alpha=1 - beta2)

    def _momentum(self, param: torch.Tensor) -> torch.Tensor:
        state = self.state[param]
        if "exp_avg" not in state:
            state["exp_avg"] = torch.zeros_like(param)
        momentum: torch.Tensor = state["exp_avg"]
        return momentum
