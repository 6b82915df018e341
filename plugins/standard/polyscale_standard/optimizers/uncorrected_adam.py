"""Adam without bias correction: moments start at zero and are used as they are.

Kingma and Ba 2015, "Adam", Algorithm 1 without its lines for the corrected moments.
"""

from __future__ import annotations

from typing import Any

import torch

from polyscale._torch import foreach
from polyscale_standard.optimizers.step_loop import StepLoop


class UncorrectedAdam(StepLoop):
    """Updates every element by itself; moments ``exp_avg`` and ``exp_avg_sq`` are shaped like the parameter."""

    granularity = "element"

    def __init__(self, params: list[Any], *, decoupled: bool, **defaults: Any) -> None:
        """``defaults``: lr, betas, eps, weight_decay, maximize; ``decoupled``: weight decay acts on the parameter."""
        super().__init__(params, defaults | {"decoupled": decoupled})

    def update(self, group: dict[str, Any], params: list[torch.Tensor]) -> None:
        """See :class:`~polyscale_standard.optimizers.step_loop.StepLoop`."""
        grads: list[Any] = [param.grad for param in params]
        first = self.buffers(params, "exp_avg")
        second = self.buffers(params, "exp_avg_sq")
        beta1, beta2 = group["betas"]
        if group["maximize"]:
            grads = foreach("neg")(grads)
        if group["weight_decay"] and group["decoupled"]:
            foreach("mul_")(params, 1 - group["lr"] * group["weight_decay"])
        elif group["weight_decay"]:
            grads = foreach("add")(grads, params, alpha=group["weight_decay"])
        foreach("mul_")(first, beta1)
        foreach("add_")(first, grads, alpha=1 - beta1)
        foreach("mul_")(second, beta2)
        foreach("addcmul_")(second, grads, grads, 1 - beta2)
        denominator = foreach("sqrt")(second)
        foreach("add_")(denominator, group["eps"])
        foreach("addcdiv_")(params, first, denominator, -group["lr"])
