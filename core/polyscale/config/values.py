"""Turn pydantic's validation errors into ours: path, value, what is expected."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from polyscale.config.errors import ConfigErrors, WrongValueError
from polyscale.config.tree import Node

M = TypeVar("M", bound=BaseModel)

_EXPECTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "int_parsing": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "bool_parsing": "true or false",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "a string",
    "string_too_short": "a string that is not empty",
    "list_type": "a list",
    "too_short": "a list that is not empty",
    "dict_type": "an object",
    "model_type": "an object",
    "none_required": "null",
    "missing": "a value: it must be given",
}
_BOUNDS = {
    "greater_than_equal": ("at least", "ge"),
    "greater_than": ("more than", "gt"),
    "less_than_equal": ("at most", "le"),
    "less_than": ("less than", "lt"),
}


def build(model: type[M], values: Mapping[str, Any], tree: Node, prefix: str = "") -> M | ConfigErrors:
    """Return the model, or what is wrong with the values, one error per path."""
    try:
        return model.model_validate(dict(values))
    except ValidationError as error:
        return _translate(error, tree, prefix)


def build_partly(model: type[M], values: Mapping[str, Any], tree: Node) -> tuple[M, ConfigErrors]:
    """Return the model without the values that are wrong, and what is wrong with those: the rest can be checked on."""
    left, errors = dict(values), ConfigErrors()
    while True:
        try:
            return model.model_validate(left), errors
        except ValidationError as error:
            if not errors:  # those of a later round come from what was taken out
                left, errors = copy.deepcopy(left), _translate(error, tree, "")
            for detail in error.errors(include_url=False):
                _take_out(left, detail["loc"])


def _take_out(values: dict[str, Any], loc: tuple[int | str, ...]) -> None:
    """Delete what ``loc`` names, in place; the whole list where it is in one, the section where a key is missing.

    pydantic's ``loc`` also names branches of unions, which are no keys.
    """
    above: list[tuple[dict[str, Any], str]] = []
    value: Any = values
    for part in loc:
        if not isinstance(value, dict):
            break
        if part in value:
            above.append((value, str(part)))
            value = value[part]
    if above:
        owner, key = above[-1]
        owner.pop(key, None)


def _translate(error: ValidationError, tree: Node, prefix: str) -> ConfigErrors:
    expected: dict[str, list[str]] = {}
    given: dict[str, tuple[Any, bool]] = {}
    for detail in error.errors(include_url=False):
        path = prefix + _path(detail["loc"], tree)
        wanted = _wanted(detail["type"], detail.get("ctx", {}), detail["msg"])
        if wanted not in expected.setdefault(path, []):
            expected[path].append(wanted)
        given[path] = (detail["input"], detail["type"] == "missing")
    return [
        WrongValueError(path if given[path][1] else f"{path} = {given[path][0]!r}", why=f"expected {_join(wanted)}")
        for path, wanted in expected.items()
    ]


def _path(loc: tuple[int | str, ...], tree: Node) -> str:
    """Return the path in the file: pydantic also names the branches of unions and validators, which are left out."""
    path, node = "", tree
    for part in loc:
        if isinstance(part, int):
            path += f"[{part}]"
            node = node.each or node
        elif part in node.children:
            path += f".{part}"
            node = node.children[part]
        elif node.each is not None:
            path += f".{part}"
            node = node.each
        elif node.free:
            path += f".{part}"
    return path.lstrip(".")


def _wanted(kind: str, context: Mapping[str, Any], message: str) -> str:
    if kind in _BOUNDS:
        words, key = _BOUNDS[kind]
        return f"{words} {context[key]:g}"
    if kind == "literal_error":
        return str(context["expected"]).replace("'", '"')
    if kind == "value_error":
        return str(context.get("error", message))
    return _EXPECTED.get(kind, message)


def _join(wanted: list[str]) -> str:
    return " or ".join(wanted)
