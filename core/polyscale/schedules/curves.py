"""From checked parameters to values by group: what each schedule gives at update k."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from polyscale.schedules import formulas

Curve = Callable[[int, Mapping[str, Any], int, float], float]
"""(update, parameters, index of the group, the group's own learning rate) -> learning rate."""


def lr_range_test(k: int, p: Mapping[str, Any], group: int, base: float) -> float:
    """Rise without end."""
    return formulas.lr_range_test(
        k,
        min_lr=of_group(p["lr_range_test_min_lr"], group),
        step_size=p["lr_range_test_step_size"],
        step_rate=p["lr_range_test_step_rate"],
        staircase=p["lr_range_test_staircase"],
    )


def one_cycle(k: int, p: Mapping[str, Any], group: int, base: float) -> float:
    """Up, down, then decay below the least."""
    low, high = of_group(p["cycle_min_lr"], group), of_group(p["cycle_max_lr"], group)
    decay = formulas.one_cycle_decay(k, cycle=_cycle(p), rate=p["decay_lr_rate"], step_size=p["decay_step_size"])
    return (low + (high - low) * _height(k, p)) / decay


def one_cycle_momentum(k: int, p: Mapping[str, Any]) -> float | None:
    """Momentum moves against the learning rate: down, up, then away; None when it is left alone."""
    if not p["cycle_momentum"]:
        return None
    low, high = p["cycle_min_mom"], p["cycle_max_mom"]
    decay = formulas.one_cycle_decay(k, cycle=_cycle(p), rate=p["decay_mom_rate"], step_size=p["decay_step_size"])
    return float((high - (high - low) * _height(k, p)) * decay)


def warmup(k: int, p: Mapping[str, Any], group: int, base: float) -> float:
    """Up to ``warmup_max_lr`` (the group's own learning rate where it is null), then constant."""
    low, high = _bounds(p, group, base)
    return low + (high - low) * _warmup(k, p)


def warmup_decay(k: int, p: Mapping[str, Any], group: int, base: float) -> float:
    """Up, then down to ``warmup_min_lr`` on a line."""
    low, high = _bounds(p, group, base)
    steps = p["warmup_num_steps"]
    share = _warmup(k, p)
    if k >= steps:
        share = formulas.linear_decay(k, warmup_steps=steps, total=p["total_num_steps"])
    return low + (high - low) * share


def warmup_cosine(k: int, p: Mapping[str, Any], group: int, base: float) -> float:
    """Up to the group's own learning rate, then down on half a cosine; the parameters are shares of it."""
    steps = p["warmup_num_steps"]
    if k < steps:
        low = float(p["warmup_min_ratio"])
        return base * (low + (1.0 - low) * _warmup(k, p))
    return base * formulas.cosine(k, warmup_steps=steps, total=p["total_num_steps"], min_ratio=p["cos_min_ratio"])


CURVES: Mapping[str, Curve] = {
    "LRRangeTest": lr_range_test,
    "OneCycle": one_cycle,
    "WarmupLR": warmup,
    "WarmupDecayLR": warmup_decay,
    "WarmupCosineLR": warmup_cosine,
}


def momentum(name: str, k: int, p: Mapping[str, Any]) -> float | None:
    """Momentum (the first beta) at update k; None where the schedule leaves it alone."""
    return one_cycle_momentum(k, p) if name == "OneCycle" else None


def of_group(value: Any, group: int) -> float:
    """Return a parameter's value for one group."""
    return float(value[group] if isinstance(value, tuple) else value)


def _bounds(p: Mapping[str, Any], group: int, base: float) -> tuple[float, float]:
    high = p["warmup_max_lr"]
    return of_group(p["warmup_min_lr"], group), base if high is None else of_group(high, group)


def _warmup(k: int, p: Mapping[str, Any]) -> float:
    return formulas.warmup(k, steps=p["warmup_num_steps"], kind=p["warmup_type"])


def _second(p: Mapping[str, Any]) -> int:
    second = p["cycle_second_step_size"]
    return int(p["cycle_first_step_size"] if second is None else second)


def _cycle(p: Mapping[str, Any]) -> int:
    return int(p["cycle_first_step_size"]) + _second(p)


def _height(k: int, p: Mapping[str, Any]) -> float:
    stairs = p["cycle_second_stair_count"]
    return formulas.one_cycle_scale(
        k,
        first=p["cycle_first_step_size"],
        second=_second(p),
        first_stairs=p["cycle_first_stair_count"],
        second_stairs=p["cycle_first_stair_count"] if stairs is None else stairs,
    )
