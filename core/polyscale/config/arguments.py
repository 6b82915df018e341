"""Arguments of constructors that are written in a configuration: optimizers' and schedules' parameters.

Notable: a number may be written as text, because YAML reads ``1e-4`` as a string; where a number is expected it counts
as one. What a constructor of torch expects is read from its annotations, since it checks few of its arguments itself:
a wrong type would be found in the first update, or never.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Mapping
from typing import Any

_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
_SEVERAL = {"list", "List", "tuple", "Tuple", "Iterable", "Sequence"}
_OTHER = {"str", "Literal", "Callable", "Any"}


def as_number(value: Any) -> Any:
    """Return the number that a string spells (``"1e-4"``, ``"100"``), and everything else as it is."""
    if isinstance(value, str) and _NUMBER.fullmatch(value.strip()):
        text = value.strip()
        return int(text) if text.lstrip("+-").isdigit() else float(text)
    return value


def parameters_of(kind: type, *leading: str) -> dict[str, inspect.Parameter]:
    """Return what the constructor of ``kind`` takes, by name, without the ``leading`` ones."""
    return {name: value for name, value in inspect.signature(kind).parameters.items() if name not in leading}


def fitted(value: Any, parameter: inspect.Parameter) -> Any:
    """Return ``value`` as ``parameter`` wants it: a number for text that spells one, an int for ``1e3``.

    Only numbers and flags are looked at; other types are the constructor's to judge.

    Raises:
        ValueError: it is of another type, or not finite; the message says what is expected.
    """
    words = _words(parameter)
    several = bool(words & _SEVERAL)
    if words & _OTHER or not words & {"int", "float", "bool"}:
        return value
    if value is None and (words & {"None", "NoneType", "Optional"} or parameter.default is None):
        return None
    if isinstance(value, (list, tuple)) and several:
        return type(value)(fitted(entry, parameter) for entry in value)
    if not words & {"int", "float"}:
        fits = isinstance(value, bool)
    else:
        value = _whole(as_number(value)) if "float" not in words else as_number(value)
        fits = _is_number(value, words) and not ("float" not in words and isinstance(value, float))
    if not fits:
        raise ValueError(_expected(words, several=several))
    return value


def fitted_all(
    values: Mapping[str, Any], parameters: Mapping[str, inspect.Parameter]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return ``values`` as the ``parameters`` want them, and for each that does not fit what is expected."""
    made: dict[str, Any] = {}
    wrong: dict[str, str] = {}
    for name, value in values.items():
        try:
            made[name] = fitted(value, parameters[name])
        except ValueError as error:
            wrong[name] = str(error)
    return made, wrong


def _words(parameter: inspect.Parameter) -> set[str]:
    annotation, default = parameter.annotation, parameter.default
    if annotation is parameter.empty:
        annotation = bool if isinstance(default, bool) else float if isinstance(default, (int, float)) else ""
    return set(re.findall(r"[A-Za-z_]\w*", str(annotation)))


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _is_number(value: Any, words: set[str]) -> bool:
    if isinstance(value, bool):
        return "bool" in words
    if isinstance(value, (int, float)):
        return math.isfinite(value)
    return not isinstance(value, (str, Mapping, list, tuple, type(None)))  # a tensor, for the constructor to judge


def _expected(words: set[str], *, several: bool) -> str:
    if not words & {"int", "float"}:
        return "true or false"
    one = "a finite number" if "float" in words else "a whole number"
    return f"{one}, or a list of them" if several else one
