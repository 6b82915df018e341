"""Hyper-parameters as data: a default, a check, and the words for what is valid.

Notable: checking needs no torch and no parameters, so a wrong configuration ends before anything is allocated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from polyscale.config.arguments import as_number
from polyscale.config.errors import raise_all
from polyscale.errors import ConfigError, nearest


@dataclass(frozen=True)
class Hyper:
    """One hyper-parameter.

    Attributes:
        default: value when none is given.
        parse: returns the value to use, or raises ValueError or TypeError.
        valid: what is valid, in words.
        per_group: whether a parameter group may have its own.
    """

    default: Any
    parse: Callable[[Any], Any]
    valid: str
    per_group: bool = True


def number(default: float | None, *, low: float = 0.0, below: float = math.inf, per_group: bool = True) -> Hyper:
    """A number in [low, below); strings that JSON writers make of floats ("1e-4") are taken."""

    def parse(value: Any) -> float | None:
        if value is None and default is None:
            return None
        if isinstance(value, bool):
            raise TypeError
        real = float(value)
        if not low <= real < below:
            raise ValueError
        return real

    limit = "" if below == math.inf else f" and below {below:g}"
    return Hyper(default, parse, f"a number of at least {low:g}{limit}", per_group)


def whole(default: int, *, low: int = 1) -> Hyper:
    """An integer of at least ``low``."""

    def parse(value: Any) -> int:
        value = as_number(value)
        if isinstance(value, bool) or int(value) != value or value < low:
            raise ValueError
        return int(value)

    return Hyper(default, parse, f"an integer of at least {low}")


def flag(default: bool, *, per_group: bool = True) -> Hyper:
    """True or false."""

    def parse(value: Any) -> bool:
        if not isinstance(value, bool):
            raise TypeError
        return value

    return Hyper(default, parse, "true or false", per_group)


def optional_flag() -> Hyper:
    """True, false, or None to let the device decide; for the whole optimizer."""

    def parse(value: Any) -> bool | None:
        if value is not None and not isinstance(value, bool):
            raise TypeError
        return value

    return Hyper(None, parse, "true, false or null", per_group=False)


def betas(default: tuple[float, float]) -> Hyper:
    """Two decay rates in [0, 1)."""

    def parse(value: Any) -> tuple[float, float]:
        if isinstance(value, str) or any(isinstance(each, bool) for each in value):
            raise TypeError
        first, second = (float(each) for each in value)
        if not (0 <= first < 1 and 0 <= second < 1):
            raise ValueError
        return first, second

    return Hyper(default, parse, "two numbers of at least 0 and below 1")


def choice(default: str, *others: str) -> Hyper:
    """One of a few words, for the whole optimizer."""

    def parse(value: Any) -> str:
        if value not in (default, *others):
            raise ValueError
        return str(value)

    return Hyper(default, parse, "one of " + ", ".join((default, *others)), per_group=False)


def check(optimizer: str, hypers: Mapping[str, Hyper], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``given`` parsed, with defaults filled in.

    Raises:
        ConfigError: one is unknown (with the nearest name) or out of range; ``SeveralConfigErrors`` when several are.
    """
    return {name: hyper.default for name, hyper in hypers.items()} | _parsed(optimizer, hypers, given)


def check_group(optimizer: str, hypers: Mapping[str, Hyper], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of one parameter group, parsed; only those given.

    Raises:
        ConfigError: one is unknown, out of range, or holds for the whole optimizer only.
    """
    whole = [
        ConfigError(
            f"optimizer.params.{name}={value!r} in a parameter group",
            why=f"It holds for the whole {optimizer} optimizer",
            fix=f"Write it once, as optimizer.params.{name}",
        )
        for name, value in given.items()
        if name in hypers and not hypers[name].per_group
    ]
    return _parsed(optimizer, hypers, given, whole)


def refuse_unknown(optimizer: str, name: str, valid: Collection[str]) -> ConfigError:
    """The error for a hyper-parameter that ``optimizer`` does not have."""
    if name == "max_grad_norm":
        fix = "Clip with the top-level key gradient_clipping"
    else:
        close = nearest(name, valid)
        fix = (f"Did you mean {close!r}? " if close else "") + "Valid: " + ", ".join(sorted(valid))
    return ConfigError(f"optimizer.params.{name}", why=f"{optimizer} has no such hyper-parameter", fix=fix)


def _parsed(
    optimizer: str, hypers: Mapping[str, Hyper], given: Mapping[str, Any], found: Iterable[ConfigError] = ()
) -> dict[str, Any]:
    """Return ``given`` parsed, or raise all that is wrong: what was ``found`` before, and each value."""
    parsed = {}
    errors = list(found)
    for name, value in given.items():
        if name not in hypers:
            errors.append(refuse_unknown(optimizer, name, hypers))
            continue
        try:
            parsed[name] = hypers[name].parse(value)
        except (TypeError, ValueError, OverflowError):
            errors.append(
                ConfigError(
                    f"optimizer.params.{name}={value!r}",
                    why=f"{optimizer} cannot use that value",
                    fix=f"Valid: {hypers[name].valid}; the default is {hypers[name].default}",
                )
            )
    raise_all(errors, f"the hyper-parameters of {optimizer}")
    return parsed
