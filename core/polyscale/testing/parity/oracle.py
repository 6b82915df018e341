"""The oracle: one process, plain torch, the joined batch of all ranks and micro-steps.

Notable: nothing of polyscale is used. ``torch.optim`` gives SGD and AdamW; the others are written from their papers.
The joined batch is a sum of backwards over its parts, each with its share of the mean, because the parts of different
ranks may use different branches.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from polyscale.testing.parity.cases import CLIP_AT, OPTIMIZERS, STEPS, Task
from polyscale.testing.parity.model import NOT_HIDDEN, batch_of, make_model

Named = Iterable[tuple[str, nn.Parameter]]


@dataclass
class Run:
    """What a training run gave.

    Attributes:
        losses: by (update, micro-step, rank).
        norms: gradient norm before clipping, of each update.
        weights: last weights by name, tied names included.
        first: first weights by name.
    """

    losses: dict[tuple[int, int, int], float] = field(default_factory=dict)
    norms: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    first: dict[str, Tensor] = field(default_factory=dict)


def oracle_run(task: Task) -> Run:
    """Train ``task`` in this process, in the dtype of the task."""
    return _run(task)


def exact_run(task: Task) -> Run:
    """Train ``task`` in this process in float64."""
    return _run(replace(task, dtype="fp64"))


@functools.lru_cache(maxsize=512)
def _run(task: Task) -> Run:
    master = make_model(task)
    compute = copy.deepcopy(master).bfloat16() if task.dtype == "bf16" else master
    optimizers = make_optimizers(task.optimizer, master.named_parameters())
    run = Run(first=weights_of(master))
    for step in range(STEPS):
        for micro in range(task.accumulation):
            for rank in range(task.world):
                loss = compute(*batch_of(step, micro, rank), task.uses_branch(step, rank))
                run.losses[step, micro, rank] = loss.item()
                (loss / (task.accumulation * task.world)).backward()
                _add_gradients(compute, master)
        limit = CLIP_AT if task.clipped else math.inf
        run.norms.append(nn.utils.clip_grad_norm_(master.parameters(), limit).item())
        for optimizer in optimizers:
            optimizer.step()
        master.zero_grad()
        _copy_weights(master, compute)
    run.weights = weights_of(master)
    return run


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Copies of all parameters by name, tied names included."""
    return {name: value.detach().clone() for name, value in model.named_parameters(remove_duplicate=False)}


def _add_gradients(compute: nn.Module, master: nn.Module) -> None:
    """Add the gradients of a bf16 copy to those of the masters, in fp32."""
    if compute is master:
        return
    for low, high in zip(compute.parameters(), master.parameters(), strict=True):
        if low.grad is not None:
            grad = low.grad.to(high.dtype)
            high.grad = grad if high.grad is None else high.grad + grad
            low.grad = None


@torch.no_grad()
def _copy_weights(master: nn.Module, compute: nn.Module) -> None:
    if compute is not master:
        for low, high in zip(compute.parameters(), master.parameters(), strict=True):
            low.copy_(high)


def make_optimizers(kind: str, parameters: Named) -> list[torch.optim.Optimizer]:
    """The optimizers of ``OPTIMIZERS[kind]``, as torch or the papers define them."""
    named = list(parameters)
    options: dict[str, Any] = OPTIMIZERS[kind]["params"]
    if kind == "sgd":
        return [torch.optim.SGD([value for _, value in named], **options)]
    if kind == "adamw":
        return [torch.optim.AdamW([value for _, value in named], **options)]
    if kind == "lion":
        return [Lion([value for _, value in named], **options)]
    if kind == "lamb":
        return [Lamb([value for _, value in named], **options)]
    hidden = [value for name, value in named if value.ndim == 2 and name.split(".")[0] not in NOT_HIDDEN]
    others = [value for name, value in named if value.ndim != 2 or name.split(".")[0] in NOT_HIDDEN]
    decay, momentum = options["weight_decay"], options["momentum"]
    adam = {"lr": options["adam_lr"], "betas": options["betas"], "eps": options["eps"], "weight_decay": decay}
    return [
        Muon(hidden, lr=options["muon_lr"], momentum=momentum, weight_decay=decay),
        torch.optim.AdamW(others, **adam),
    ]


class Lion(torch.optim.Optimizer):
    """Chen et al. 2023, "Symbolic discovery of optimization algorithms", algorithm 2."""

    def __init__(self, params: list[nn.Parameter], *, lr: float, betas: list[float], weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for w in group["params"]:
                if w.grad is None:
                    continue
                m = self.state[w].setdefault("m", torch.zeros_like(w))
                c = beta1 * m + (1 - beta1) * w.grad
                w.copy_(w - group["lr"] * (torch.sign(c) + group["weight_decay"] * w))
                m.copy_(beta2 * m + (1 - beta2) * w.grad)


class Lamb(torch.optim.Optimizer):
    """You et al. 2020, "Large batch optimization for deep learning", algorithm 2; the ratio is held in [0.01, 10]."""

    def __init__(
        self, params: list[nn.Parameter], *, lr: float, betas: list[float], eps: float, weight_decay: float
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for x in group["params"]:
                if x.grad is None:
                    continue
                state = self.state[x]
                t = state["t"] = state.get("t", 0) + 1
                m = state.setdefault("m", torch.zeros_like(x))
                v = state.setdefault("v", torch.zeros_like(x))
                m.copy_(beta1 * m + (1 - beta1) * x.grad)
                v.copy_(beta2 * v + (1 - beta2) * x.grad**2)
                r = (m / (1 - beta1**t)) / (torch.sqrt(v / (1 - beta2**t)) + group["eps"])
                u = r + group["weight_decay"] * x
                ratio = (x.norm() / u.norm()).clamp(0.01, 10.0) if x.norm() > 0 and u.norm() > 0 else 1.0
                x.copy_(x - group["lr"] * ratio * u)


class Muon(torch.optim.Optimizer):
    """Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks", with Nesterov momentum.

    The momentum is a moving average, as in the authors' code, and a tall matrix moves sqrt(rows / columns) further.
    """

    def __init__(self, params: list[nn.Parameter], *, lr: float, momentum: float, weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            mu = group["momentum"]
            for w in group["params"]:
                if w.grad is None or w.numel() == 0:
                    continue
                m = self.state[w].setdefault("m", torch.zeros_like(w))
                m.copy_(mu * m + (1 - mu) * w.grad)
                update = orthogonalised(mu * m + (1 - mu) * w.grad)
                scale = math.sqrt(max(1.0, w.shape[0] / w.shape[1]))
                w.copy_(w * (1 - group["lr"] * group["weight_decay"]) - group["lr"] * scale * update)


def orthogonalised(g: Tensor) -> Tensor:
    """Five Newton-Schulz steps with the coefficients of the post; (rows, columns), in the dtype of ``g``."""
    if g.shape[0] > g.shape[1]:
        return orthogonalised(g.T).T
    x: Tensor = g / (torch.linalg.matrix_norm(g) + 1e-7)
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x
