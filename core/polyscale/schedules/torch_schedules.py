"""Schedules of ``torch.optim.lr_scheduler`` by name.

Notable: parameters are compared with the constructor's signature before anything is made. Left out are classes that
need objects a configuration cannot hold (functions, other schedulers) or a metric, which a step of the engine has not.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer, lr_scheduler

from polyscale.errors import ConfigError, nearest
from polyscale.schedules.parameters import SCHEDULES, missing_parameters, unknown_parameter

if TYPE_CHECKING:
    from polyscale.config import SchedulerSection

_LEFT_OUT = {
    "LambdaLR": "it needs a function, which a configuration cannot hold",
    "MultiplicativeLR": "it needs a function, which a configuration cannot hold",
    "SequentialLR": "it needs other schedulers, which a configuration cannot hold",
    "ChainedScheduler": "it needs other schedulers, which a configuration cannot hold",
    "ReduceLROnPlateau": "it needs a metric at every step, which the engine has not",
}


def names() -> list[str]:
    """Return the schedules of torch that can be named in a configuration, sorted."""
    return sorted(name for name, value in vars(lr_scheduler).items() if _is_schedule(name, value))


def check(section: SchedulerSection) -> type[lr_scheduler.LRScheduler]:
    """Return the class that ``section`` names, its parameters checked against the constructor.

    Raises:
        ConfigError: an unknown name, a missing or unknown parameter.
    """
    name = section.type
    if name in _LEFT_OUT:
        raise ConfigError(
            f"scheduler.type = {name!r}", why=_LEFT_OUT[name], fix="Pass it to polyscale.initialize as lr_scheduler="
        )
    found = getattr(lr_scheduler, name, None)
    if found is None or not _is_schedule(name, found):
        known = [*SCHEDULES, *names()]
        close = nearest(name, known)
        hint = f"Did you mean {close!r}? " if close else ""
        raise ConfigError(f"scheduler.type = {name!r}", why="no such schedule", fix=f"{hint}Known: {', '.join(known)}")
    _check_params(name, found, section.params)
    kind: type[lr_scheduler.LRScheduler] = found
    return kind


def build(optimizer: Optimizer, section: SchedulerSection) -> lr_scheduler.LRScheduler:
    """Make a schedule of torch.

    Raises:
        ConfigError: as ``check``, or the constructor refuses a value.
    """
    kind: Any = check(section)
    try:
        made: lr_scheduler.LRScheduler = kind(optimizer, **section.params)
    except (TypeError, ValueError, KeyError, ZeroDivisionError) as error:
        given = ", ".join(f"{key} {value!r}" for key, value in section.params.items())
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


def _check_params(name: str, kind: type, params: dict[str, Any]) -> None:
    signature = inspect.signature(kind)
    known = {key: value for key, value in signature.parameters.items() if key != "optimizer"}
    for key in params:
        if key not in known:
            raise unknown_parameter(name, key, list(known))
    missing = [key for key, value in known.items() if value.default is value.empty and key not in params]
    if missing:
        raise missing_parameters(name, missing)
