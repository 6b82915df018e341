"""The parameters of the five schedules: names, defaults, ranges, as data; and how they are checked.

Notable: a value may be one number, or a list with one number per group of the optimizer, where DeepSpeed takes lists;
numbers may be written as text, as YAML reads ``1e-4``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from polyscale.config.arguments import as_number
from polyscale.config.errors import raise_all
from polyscale.errors import ConfigError, nearest

REQUIRED = object()
"""Default of a parameter that must be given."""


@dataclass(frozen=True)
class Parameter:
    """One parameter of a schedule.

    Attributes:
        default: its value when absent; None is allowed as a value where it is the default.
        kind: "number", "whole", "flag" or "warmup" ("log" or "linear").
        least: smallest value, or None.
        per_group: whether a list with one value per group is accepted.
    """

    default: Any
    kind: Literal["number", "whole", "flag", "warmup"] = "number"
    least: float | None = 0
    per_group: bool = False


_WHOLE_POSITIVE: Mapping[str, Any] = {"kind": "whole", "least": 1}
_LAST = Parameter(-1, kind="whole", least=-1)
_WARMUP_STEPS = Parameter(1000, **_WHOLE_POSITIVE)
_TOTAL = Parameter(REQUIRED, **_WHOLE_POSITIVE)
_TYPE = Parameter("log", kind="warmup", least=None)

SCHEDULES: Mapping[str, Mapping[str, Parameter]] = {
    "LRRangeTest": {
        "lr_range_test_min_lr": Parameter(1e-3, per_group=True),
        "lr_range_test_step_size": Parameter(2000, **_WHOLE_POSITIVE),
        "lr_range_test_step_rate": Parameter(1.0),
        "lr_range_test_staircase": Parameter(False, kind="flag", least=None),
        "last_batch_iteration": _LAST,
    },
    "OneCycle": {
        "cycle_min_lr": Parameter(REQUIRED, per_group=True),
        "cycle_max_lr": Parameter(REQUIRED, per_group=True),
        "decay_lr_rate": Parameter(0.0),
        "cycle_first_step_size": Parameter(2000, **_WHOLE_POSITIVE),
        "cycle_second_step_size": Parameter(None, **_WHOLE_POSITIVE),
        "cycle_first_stair_count": Parameter(0, kind="whole"),
        "cycle_second_stair_count": Parameter(None, kind="whole"),
        "decay_step_size": Parameter(0, kind="whole"),
        "cycle_momentum": Parameter(True, kind="flag", least=None),
        "cycle_min_mom": Parameter(0.8),
        "cycle_max_mom": Parameter(0.9),
        "decay_mom_rate": Parameter(0.0),
        "last_batch_iteration": _LAST,
    },
    "WarmupLR": {
        "warmup_min_lr": Parameter(0.0, per_group=True),
        "warmup_max_lr": Parameter(None, per_group=True),
        "warmup_num_steps": _WARMUP_STEPS,
        "warmup_type": _TYPE,
        "last_batch_iteration": _LAST,
    },
    "WarmupDecayLR": {
        "total_num_steps": _TOTAL,
        "warmup_min_lr": Parameter(0.0, per_group=True),
        "warmup_max_lr": Parameter(1e-3, per_group=True),
        "warmup_num_steps": _WARMUP_STEPS,
        "warmup_type": _TYPE,
        "last_batch_iteration": _LAST,
    },
    "WarmupCosineLR": {
        "total_num_steps": _TOTAL,
        "warmup_min_ratio": Parameter(0.0),
        "warmup_num_steps": _WARMUP_STEPS,
        "cos_min_ratio": Parameter(1e-4),
        "warmup_type": _TYPE,
        "last_batch_iteration": _LAST,
    },
}


def checked(name: str, params: Mapping[str, Any], *, unresolved: Collection[str] = ()) -> dict[str, Any]:
    """Return all parameters of schedule ``name``, defaults filled in.

    Args:
        name: of the schedule.
        params: those given.
        unresolved: those that will be given later; they are left out.

    Raises:
        ConfigError: a parameter is unknown, missing, or has a value that it cannot have; all of them at once.
    """
    known = SCHEDULES[name]
    errors = [unknown_parameter(name, key, list(known)) for key in params if key not in known]
    required = [key for key, parameter in known.items() if parameter.default is REQUIRED]
    missing = [key for key in required if key not in params and key not in unresolved]
    if missing:
        errors.append(missing_parameters(name, missing))
    full = {}
    for key, parameter in known.items():
        if key in unresolved or key in missing:
            continue
        try:
            full[key] = _value(key, parameter, params.get(key, parameter.default))
        except ConfigError as error:
            errors.append(error)
    if not errors:
        errors += _order(name, full)
    raise_all(errors, f"scheduler {name}")
    return full


def unknown_parameter(name: str, key: str, known: list[str]) -> ConfigError:
    """Return the error for a parameter that schedule ``name`` does not have."""
    close = nearest(key, known)
    hint = f"Did you mean {close!r}? " if close else ""
    return ConfigError(
        f"Unknown key scheduler.params.{key}",
        why=f"{name} has no such parameter",
        fix=f"{hint}Known: {', '.join(known)}",
    )


def missing_parameters(name: str, missing: list[str]) -> ConfigError:
    """Return the error for parameters that must be given."""
    keys = ", ".join(f"scheduler.params.{key}" for key in missing)
    return ConfigError(
        f"scheduler {name} without {keys}", why=f"{name} cannot be computed without", fix="Give it a value"
    )


def _value(key: str, parameter: Parameter, value: Any) -> Any:
    if value is None and parameter.default is None:
        return None
    if isinstance(value, (list, tuple)) and parameter.per_group and value:
        return tuple(_single(key, parameter, entry) for entry in value)
    return _single(key, parameter, value)


def _single(key: str, parameter: Parameter, value: Any) -> Any:
    expected = {"number": "a number", "whole": "a whole number", "flag": "true or false", "warmup": '"log" or "linear"'}
    wanted = expected[parameter.kind]
    if parameter.kind == "flag":
        fits = isinstance(value, bool)
    elif parameter.kind == "warmup":
        fits = value in ("log", "linear")
    else:
        value = as_number(value)
        fits = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < float("inf")
        if fits and parameter.kind == "whole":
            fits = float(value).is_integer()
            value = int(value) if fits else value
        if parameter.least is not None:
            wanted += f" of at least {parameter.least:g}"
            fits = fits and value >= parameter.least
    if not fits:
        per_group = ", or a list with one for each group" if parameter.per_group else ""
        raise ConfigError(f"scheduler.params.{key} = {value!r}", why=f"expected {wanted}{per_group}")
    return value


def _order(name: str, full: Mapping[str, Any]) -> Iterator[ConfigError]:
    total, steps = full.get("total_num_steps"), full.get("warmup_num_steps")
    if total is not None and steps is not None and total < steps:
        yield ConfigError(
            f"scheduler.params.total_num_steps {total}, warmup_num_steps {steps}",
            why=f"{name} would end before its warm-up",
            fix=f"Write total_num_steps of at least {steps}, or a shorter warm-up",
        )
