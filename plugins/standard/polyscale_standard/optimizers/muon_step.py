"""The optimizer class of Muon, and its Newton-Schulz iteration.

Notable: momentum is kept on the local shard and needs no communication; only the update is assembled, and every rank
orthogonalises it: small matrices of one shape together, since their calls cost more than their arithmetic, any other by
itself, so that one at a time is in memory. All ranks therefore step through the same matrices in the same order, which
holds because a gradient is None on every rank or on none.

Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks"; the alternative scale of the update is
that of Liu et al. 2025, "Muon is Scalable for LLM Training", section 2.2.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.adamw import adamw

from polyscale._torch import foreach
from polyscale_standard.optimizers.step_loop import StepLoop

if TYPE_CHECKING:
    from polyscale.parameters.store import ParameterStore

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
NORM_EPS = 1e-7
SMALL = 64 * 64
"""Elements of a matrix up to which stacking is faster (measured on the CPU: twice at 64 x 64; slower at 128 x 128)."""


def newton_schulz(matrix: torch.Tensor, *, steps: int) -> torch.Tensor:
    """Move the singular values of ``matrix`` (..., rows, columns) into about [0.7, 1.2], in its own dtype.

    Each step applies the quintic a X + b (X X^T) X + c (X X^T)^2 X.
    """
    a, b, c = COEFFICIENTS
    tall = matrix.size(-2) > matrix.size(-1)
    x: torch.Tensor = matrix.mT if tall else matrix
    x = x / (torch.linalg.matrix_norm(x, keepdim=True) + NORM_EPS)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


def update_scale(shape: torch.Size, rule: str) -> float:
    """The factor on the learning rate for a matrix of ``shape``, by ``rule`` ("original" or "match_rms_adamw")."""
    rows, columns = shape
    if rule == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1.0, rows / columns))


class Muon(StepLoop):
    """Groups with ``algorithm`` "muon" are orthogonalised, those with "adamw" are not. A step is collective.

    State: ``momentum_buffer`` for Muon's parameters; ``step`` (0-dimensional fp32), ``exp_avg`` and ``exp_avg_sq`` for
    AdamW's. All but ``step`` are shaped like the local parameter.
    """

    granularity = "matrix"

    def __init__(self, params: list[Any], store: ParameterStore) -> None:
        """``params``: groups whose ``params`` are (name, local parameter) pairs."""
        super().__init__(params, {"algorithm": "adamw", "lr": 0.0})
        self._store = store

    def update(self, group: dict[str, Any], params: list[torch.Tensor]) -> None:
        """See :class:`~polyscale_standard.optimizers.step_loop.StepLoop`."""
        if group["algorithm"] == "muon":
            self._muon(group, params)
        else:
            self._adamw(group, params)

    def _muon(self, group: dict[str, Any], params: list[torch.Tensor]) -> None:
        names = dict(zip(group["params"], group["param_names"], strict=True))
        grads: list[Any] = [param.grad for param in params]
        momenta = self.buffers(params, "momentum_buffer")
        foreach("lerp_")(momenta, grads, 1 - group["momentum"])
        small: dict[Any, list[tuple[torch.Tensor, torch.Tensor]]] = defaultdict(list)
        for param, grad, momentum in zip(params, grads, momenta, strict=True):
            update = grad.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum
            full = self._store.assemble(names[param], update)
            if full.numel() > SMALL:
                self._apply(group, names[param], param, _orthogonal(full, group))
            elif full.numel() > 0:
                small[full.shape, full.dtype].append((param, full))
        for pairs in small.values():
            together = _orthogonal(torch.stack([full for _, full in pairs]), group)
            for (param, _), orthogonal in zip(pairs, together, strict=True):
                self._apply(group, names[param], param, orthogonal)

    def _apply(self, group: dict[str, Any], name: str, param: torch.Tensor, orthogonal: torch.Tensor) -> None:
        local = self._store.extract(name, orthogonal.to(param.dtype)).reshape(param.shape)
        if group["weight_decay"]:
            param.mul_(1 - group["lr"] * group["weight_decay"])
        param.add_(local, alpha=-group["lr"] * update_scale(orthogonal.shape, group["adjust_lr"]))

    def _adamw(self, group: dict[str, Any], params: list[torch.Tensor]) -> None:
        beta1, beta2 = group["betas"]
        grads: list[Any] = [param.grad for param in params]
        adamw(
            params,
            grads,
            self.buffers(params, "exp_avg"),
            self.buffers(params, "exp_avg_sq"),
            [],
            self.step_counts(params),
            foreach=True,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


def _orthogonal(update: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
    work = update.bfloat16() if group["ns_dtype"] == "bf16" else update
    return newton_schulz(work, steps=group["ns_steps"])
