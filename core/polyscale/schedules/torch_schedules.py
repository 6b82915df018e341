"""Schedules of ``torch.optim.lr_scheduler`` by name.

Notable: parameters are compared with the constructor's signature before anything is made. Left out are classes that
need objects a configuration cannot hold (functions, other schedulers) or a metric, which a step of the engine has not.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer, lr_scheduler

from polyscale.config.arguments import fitted_all, parameters_of
from polyscale.config.errors import raise_all
from polyscale.errors import ConfigError, nearest
from polyscale.schedules.parameters import SCHEDULES, missing_parameters, unknown_parameter

if TYPE_CHECKING:
    from polyscale.config import SchedulerSection

_PASS = "Pass it to polyscale.initialize as lr_scheduler="
_LEFT_OUT = {
    "LambdaLR": ("it needs a function, which a configuration cannot hold", _PASS),
    "MultiplicativeLR": ("it needs a function, which a configuration cannot hold", _PASS),
    "SequentialLR": ("it needs other schedulers, which a configuration cannot hold", _PASS),
    "ChainedScheduler": ("it needs other schedulers, which a configuration cannot hold", _PASS),
    "ReduceLROnPlateau": (
        "its step() needs a metric, which the engine does not know",
        "Leave scheduler out, make one over engine.optimizer, call its step(metric) yourself, and engine.track it",
    ),
}


def names() -> list[str]:
    """Return the schedules of torch that can be named in a configuration, sorted."""
    return sorted(name for name, value in vars(lr_scheduler).items() if _is_schedule(name, value))


def check(
    section: SchedulerSection, *, unresolved: Collection[str] = ()
) -> tuple[type[lr_scheduler.LRScheduler], dict[str, Any]]:
    """Return the class that ``section`` names, and its parameters, checked against the constructor.

    Args:
        section: name and parameters.
        unresolved: parameters that will be given later: they are not missing.

    Raises:
        ConfigError: an unknown name, a missing or unknown parameter, a value of a wrong type.
    """
    name = section.type
    if name in _LEFT_OUT:
        why, fix = _LEFT_OUT[name]
        raise ConfigError(f"scheduler.type = {name!r}", why=why, fix=fix)
    found = getattr(lr_scheduler, name, None)
    if found is None or not _is_schedule(name, found):
        known = [*SCHEDULES, *names()]
        close = nearest(name, known)
        hint = f"Did you mean {close!r}? " if close else ""
        raise ConfigError(f"scheduler.type = {name!r}", why="no such schedule", fix=f"{hint}Known: {', '.join(known)}")
    kind: type[lr_scheduler.LRScheduler] = found
    return kind, _checked(name, kind, section.params, unresolved)


def build(optimizer: Optimizer, section: SchedulerSection) -> lr_scheduler.LRScheduler:
    """Make a schedule of torch.

    Raises:
        ConfigError: as ``check``, or the constructor refuses a value.
    """
    kind, params = check(section)
    try:
        made: lr_scheduler.LRScheduler = kind(optimizer, **params)
    except (TypeError, ValueError, KeyError, ZeroDivisionError) as error:
        given = ", ".join(f"{key} {value!r}" for key, value in params.items())
        raise ConfigError(
            f"scheduler {section.type} with {given or 'no parameters'}", why=f"torch refuses it: {error}"
        ) from error
    return made


def _is_schedule(name: str, value: Any) -> bool:
    return (
        isinstance(value, type)
        and issubclass(value, lr_scheduler.LRScheduler)
        and not name.startswith("_")
        and value is not lr_scheduler.LRScheduler
        and name not in _LEFT_OUT
    )


def _checked(name: str, kind: type, params: dict[str, Any], unresolved: Collection[str]) -> dict[str, Any]:
    known = parameters_of(kind, "optimizer")
    errors = [unknown_parameter(name, key, list(known)) for key in params if key not in known]
    required = [key for key, value in known.items() if value.default is value.empty]
    missing = [key for key in required if key not in params and key not in unresolved]
    if missing:
        errors.append(missing_parameters(name, missing))
    made, wrong = fitted_all({key: value for key, value in params.items() if key in known}, known)
    errors += [
        ConfigError(f"scheduler.params.{key} = {params[key]!r}", why=f"{name} expects {wanted}")
        for key, wanted in wrong.items()
    ]
    raise_all(errors, f"scheduler {name}")
    return made
