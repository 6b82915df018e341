"""The five schedules of DeepSpeed as functions of the update k, counted from 0.

Notable: each function is one formula, without state. DeepSpeed uses the warm-up's first value for two updates, so its
warm-ups and its linear decay lag one update behind the curve; here update k has the value at k. What has an end stays
there.

Sources of the ideas: range test and one-cycle policy, Smith 2018, "A disciplined approach to neural network
hyper-parameters", sections 4 and 5; cosine annealing, Loshchilov and Hutter 2017, "SGDR", eq. 5.
"""

from __future__ import annotations

import math
from typing import Literal

WarmupType = Literal["log", "linear"]


def lr_range_test(k: int, *, min_lr: float, step_size: int, step_rate: float, staircase: bool) -> float:
    """Learning rate that rises from ``min_lr`` by ``step_rate`` of it every ``step_size`` updates.

    With ``staircase`` it rises at once at the end of each interval, else a little with every update.
    """
    intervals = k / step_size
    if staircase:
        intervals = float(k // step_size)
    return min_lr * (1.0 + step_rate * intervals)


def one_cycle_scale(k: int, *, first: int, second: int, first_stairs: int, second_stairs: int) -> float:
    """Height in the cycle, 0 to 1: up over ``first`` updates, down over ``second``, then 0.

    With stairs the height of a phase is rounded down to a multiple of 1 / stairs.
    """
    if k <= first:
        return _share(k, first, first_stairs)
    if k < first + second:
        return _share(first + second - k, second, second_stairs)
    return 0.0


def one_cycle_decay(k: int, *, cycle: int, rate: float, step_size: int) -> float:
    """Factor ``1 + rate * intervals`` after a cycle of ``cycle`` updates; 1 during it, or where ``step_size`` is 0.

    The learning rate is divided by it, momentum is multiplied by it.
    """
    if step_size == 0 or k <= cycle:
        return 1.0
    return 1.0 + rate * (k - cycle) / step_size


def warmup(k: int, *, steps: int, kind: WarmupType) -> float:
    """Share of the warm-up that is done at update k, 0 to 1; 1 from update ``steps`` on.

    log: ln(k + 1) / ln(steps), which reaches 1 one update early; linear: k / steps.
    """
    if k >= steps:
        return 1.0
    if kind == "linear":
        return k / steps
    return math.log(k + 1) / math.log(max(2, steps))


def linear_decay(k: int, *, warmup_steps: int, total: int) -> float:
    """Share that is left at update k of a decay from ``warmup_steps`` (1) to ``total`` (0); 0 afterwards."""
    return min(1.0, max(0.0, (total - k) / max(1, total - warmup_steps)))


def cosine(k: int, *, warmup_steps: int, total: int, min_ratio: float) -> float:
    """Half a cosine from 1 at ``warmup_steps`` to ``min_ratio`` at ``total``; ``min_ratio`` afterwards."""
    done = min(1.0, max(0.0, (k - warmup_steps) / max(1, total - warmup_steps)))
    return min_ratio + (1.0 - min_ratio) * (1.0 + math.cos(math.pi * done)) / 2.0


def _share(done: int, steps: int, stairs: int) -> float:
    # Whole numbers until the last division: a share that is a stair exactly must not be rounded below it.
    return (done * stairs // steps) / stairs if stairs > 0 else done / steps
