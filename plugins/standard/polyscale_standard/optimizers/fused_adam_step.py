"""The optimizer classes over the op ``fused_adam_``.

Notable: they are called as torch's (and as the one here without bias correction), because checkpoints name the class:
states and hyper-parameters are the same, only how they are computed differs.

Kingma and Ba 2015, "Adam", Algorithm 1; Loshchilov and Hutter 2019, "Decoupled Weight Decay Regularization",
Algorithm 2.
"""

from __future__ import annotations

from typing import Any

import torch

from polyscale.ops import use
from polyscale_standard.optimizers.step_loop import StepLoop


class FusedStep(StepLoop):
    """Updates every element by itself; moments ``exp_avg`` and ``exp_avg_sq`` are shaped like the parameter."""

    granularity = "element"
    decoupled = True
    bias_correction = True

    def __init__(self, params: list[Any], **defaults: Any) -> None:
        """``defaults``: lr, betas, eps, weight_decay, maximize."""
        super().__init__(params, defaults)

    def update(self, group: dict[str, Any], params: list[torch.Tensor]) -> None:
        """See :class:`~polyscale_standard.optimizers.step_loop.StepLoop`."""
        beta1, beta2 = group["betas"]
        settings = {
            "lr": float(group["lr"]),
            "beta1": beta1,
            "beta2": beta2,
            "eps": group["eps"],
            "weight_decay": group["weight_decay"],
            "decoupled": self._decouples(group),
            "grad_scale": -1.0 if group["maximize"] else 1.0,
            "bias_correction": self.bias_correction,
        }
        first, second = self.buffers(params, "exp_avg"), self.buffers(params, "exp_avg_sq")
        ops = {device: use("fused_adam_", device) for device in {param.device.type for param in params}}
        for param, moment1, moment2 in zip(params, first, second, strict=True):
            adam = ops[param.device.type]
            adam(param, moment1, moment2, param.grad, step=self._count(param), **settings)

    def _decouples(self, group: dict[str, Any]) -> bool:
        return self.decoupled

    def _count(self, param: torch.Tensor) -> int:
        """Count this update of ``param`` in its state ``step``, an fp32 number on the host, as torch keeps it."""
        state = self.state[param]
        step = state.get("step")
        if not isinstance(step, torch.Tensor) or step.device.type != "cpu":  # the first, or that of torch's fused form
            state["step"] = step = torch.tensor(float(step or 0), dtype=torch.float32)
        step += 1
        return int(step)


class Adam(FusedStep):
    """Adam; weight decay is added to the gradient."""

    decoupled = False


class AdamW(FusedStep):
    """AdamW; weight decay acts on the parameter."""


class UncorrectedAdam(FusedStep):
    """Adam or AdamW whose moments start at zero and are used as they are; it counts no updates."""

    bias_correction = False

    def __init__(self, params: list[Any], *, decoupled: bool, **defaults: Any) -> None:
        """``decoupled``: weight decay acts on the parameter."""
        super().__init__(params, decoupled=decoupled, **defaults)

    def _decouples(self, group: dict[str, Any]) -> bool:
        return bool(group["decoupled"])

    def _count(self, param: torch.Tensor) -> int:
        return 1
