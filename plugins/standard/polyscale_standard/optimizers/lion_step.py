"""The optimizer class of Lion. Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms", Algorithm 2."""

from __future__ import annotations

from typing import Any

import torch

from polyscale._torch import foreach
from polyscale_standard.optimizers.step_loop import StepLoop


class Lion(StepLoop):
    """Updates every element by itself; its momentum ``exp_avg`` is shaped like the parameter."""

    granularity = "element"

    def __init__(self, params: list[Any], *, lr: float, betas: tuple[float, float], weight_decay: float) -> None:
        """``betas``: of the interpolation whose sign is the update, and of the momentum."""
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    def update(self, group: dict[str, Any], params: list[torch.Tensor]) -> None:
        """See :class:`~polyscale_standard.optimizers.step_loop.StepLoop`."""
        grads = [param.grad for param in params]
        momenta = self.buffers(params, "exp_avg")
        beta1, beta2 = group["betas"]
        direction = foreach("mul")(momenta, beta1)
        foreach("add_")(direction, grads, alpha=1 - beta1)
        foreach("sign_")(direction)
        if group["weight_decay"]:
            foreach("mul_")(params, 1 - group["lr"] * group["weight_decay"])
        foreach("add_")(params, direction, alpha=-group["lr"])
        foreach("mul_")(momenta, beta2)
        foreach("add_")(momenta, grads, alpha=1 - beta2)
