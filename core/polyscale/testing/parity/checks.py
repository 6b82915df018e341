"""How close a run must come to the oracle, by dtype and optimizer.

=====  ===================================================  ===================================================
dtype  losses                                               weights after the last update
=====  ===================================================  ===================================================
fp64   within 1e-10                                         within 1e-10
fp32   within 5e-6                                          SGD: within 1e-6 of the tensor's maximum; others: at
                                                            most 4 x as far from the float64 run as one process
bf16   at most 4 x as far from float64 as one process       at most 4 x as far from float64 as one process
=====  ===================================================  ===================================================

Notable: distances of weights are root mean squares, per tensor and of the whole model. A tensor that one process
happens to get right is allowed the distance of the whole model instead; in bf16, where a few elements of a small tensor
decide, that of the worst tensor. Gradient norms are held to 1e-9, 1e-5 and 4 times. What no rank used
and what is frozen must not have moved by a bit, and all ranks must hold equal weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from polyscale.testing.closeness import TIMES, elements_off, rms, tensors_off, unlike
from polyscale.testing.parity.cases import Case, Task
from polyscale.testing.parity.oracle import exact_run, oracle_run
from polyscale.testing.parity.runner import RankRun

FP64 = 1e-10
FP32_LOSS = 5e-6
FP32_SGD = 1e-6
NORM = {"fp64": 1e-9, "fp32": 1e-5}


class ParityError(AssertionError):
    """A run differs from the oracle; says in what, and by how much."""


def check(case: Case, runs: list[RankRun]) -> None:
    """Compare the runs of all ranks with the oracle.

    Raises:
        ParityError: they differ, or a rank failed. All differences are listed.
    """
    errors = [f"rank {rank} failed:\n{run.error}" for rank, run in enumerate(runs) if run.error]
    problems = errors or list(_differences(case.task, runs))
    if problems:
        raise ParityError("\n".join([f"{case} differs from one process", *problems]))


def _differences(task: Task, runs: list[RankRun]) -> Iterable[str]:
    yield from _steps(task, runs)
    yield from _losses(task, runs)
    yield from _norms(task, runs)
    weights = runs[0].weights
    for rank, run in enumerate(runs[1:], 1):
        if unequal := [name for name in weights if not _equal(run.weights.get(name), weights[name])]:
            yield f"rank {rank} holds other weights than rank 0: {unequal}"
    yield from _still(task, weights)
    yield from weight_differences(task, weights)


def _steps(task: Task, runs: list[RankRun]) -> Iterable[str]:
    micro_steps = len(runs[0].stepped)
    expected = [(micro + 1) % task.accumulation == 0 for micro in range(micro_steps)]
    if any(run.stepped != expected for run in runs):
        yield f"step() returned {[run.stepped for run in runs]}, not {expected} on every rank"


def _losses(task: Task, runs: list[RankRun]) -> Iterable[str]:
    found = {(*key, rank): loss for rank, run in enumerate(runs) for key, loss in run.losses.items()}
    own, exact = oracle_run(task).losses, exact_run(task).losses
    if set(found) != set(own):
        yield "losses of some micro-steps are missing"
        return
    if task.dtype == "bf16":
        against, limit = exact, TIMES * max(abs(own[key] - exact[key]) for key in own)
    else:
        against, limit = own, FP64 if task.dtype == "fp64" else FP32_LOSS
    errors = {key: abs(found[key] - against[key]) for key in found}
    wrong = [key for key, error in errors.items() if not error <= limit]  # NaN is wrong, and in no order
    if wrong:
        worst = max(wrong, key=lambda key: math.inf if math.isnan(errors[key]) else errors[key])
        error = errors[worst]
        yield f"loss of (update, micro-step, rank) {worst} is {found[worst]!r}: off by {error:.3g}, allowed {limit:.3g}"


def _norms(task: Task, runs: list[RankRun]) -> Iterable[str]:
    own, exact = oracle_run(task).norms, exact_run(task).norms
    for rank, run in enumerate(runs):
        if None in run.norms:
            if task.clipped:
                yield f"rank {rank} has no grad_norm although gradients are clipped"
            continue
        for step, norm in enumerate(run.norms):
            if task.dtype == "bf16":
                against, limit = exact[step], TIMES * max(map(_distance, own, exact))
            else:
                against, limit = own[step], NORM[task.dtype] * own[step]
            if not abs((norm or 0.0) - against) <= limit:
                yield f"grad_norm of update {step} on rank {rank} is {norm!r}, not {against!r} +- {limit:.3g}"


def _distance(a: float, b: float) -> float:
    return abs(a - b)


def _still(task: Task, weights: Mapping[str, Tensor]) -> Iterable[str]:
    run = oracle_run(task)
    for name, first in run.first.items():
        if torch.equal(run.weights[name], first) and not _equal(weights.get(name), first):
            yield f"{name} has no gradient on any rank, and moved"


def _equal(found: Tensor | None, right: Tensor) -> bool:
    return found is not None and found.dtype == right.dtype and torch.equal(found, right)


def weight_differences(task: Task, weights: Mapping[str, Tensor]) -> Iterable[str]:
    """Yield a sentence for each tensor of ``weights`` that is farther from the oracle than its task allows."""
    own, exact = oracle_run(task).weights, exact_run(task).weights
    yield from unlike(weights, own)
    if task.dtype == "fp64":
        yield from elements_off(weights, own, within=FP64)
    elif task.dtype == "fp32" and task.optimizer == "sgd":
        yield from elements_off(weights, own, of_maximum=FP32_SGD)
    elif task.dtype == "fp32":
        yield from tensors_off(weights, own, exact, times=TIMES)
    else:
        worst = max(rms([own[name].double() - value]) for name, value in exact.items())
        yield from tensors_off(weights, own, exact, times=TIMES, least=worst)
