"""Read a configuration from a dict, a path, or JSON text, and refuse keys that stand twice."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from polyscale.config.errors import SourceError, raise_all
from polyscale.config.origin import Origin

_BOM = "\ufeff"


@dataclass(frozen=True)
class Source:
    """What was read, and what to call it."""

    values: dict[str, Any]
    origin: Origin
    name: str


class _Object(dict[str, Any]):
    """A JSON object that remembers the keys that stood twice."""

    twice: tuple[str, ...] = ()


def read(source: Mapping[str, Any] | str | PathLike[str]) -> Source:
    """Read ``source``: a dict, a path, or JSON text (which starts with a brace).

    Raises:
        SourceError: no such file, not JSON, not an object, or a key twice.
    """
    if isinstance(source, Mapping):
        name = "the configuration"
        return Source(_plain(source, ""), Origin("argument", "dict"), name)
    if isinstance(source, str) and is_text(source):
        return Source(parse(source, "the JSON text"), Origin("argument", "JSON text"), "the JSON text")
    if not isinstance(source, (str, PathLike)):
        raise SourceError(
            f"A configuration of type {type(source).__name__}", fix="Give a dict, a path, JSON text or a Config"
        )
    if not str(source).strip():
        raise SourceError("An empty string as configuration", fix="Give a path, JSON text or a dict")
    path = Path(source)
    return Source(parse(_text(path), str(path)), Origin("file", str(path)), str(path))


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")  # editors of Windows write a byte-order mark
    except FileNotFoundError:
        raise SourceError(
            f"Configuration {str(path)!r}",
            why=f"no such file, seen from {Path.cwd()}; as JSON text it would start with a brace",
            fix="Give the path of a JSON file, JSON text, or a dict; `scale config init --stage 2` prints one",
        ) from None
    except (OSError, ValueError) as error:  # ValueError: bytes that are no text, a name that no file can have
        reason = getattr(error, "strerror", None) or str(error)
        raise SourceError(f"Configuration {str(path)!r}", why=f"it cannot be read: {reason}") from None


def is_text(source: str) -> bool:
    """Whether ``source`` is JSON text rather than a path."""
    return source.lstrip(_BOM).lstrip().startswith("{")


def parse(text: str, name: str) -> dict[str, Any]:
    """Return the configuration that JSON ``text`` spells.

    Args:
        text: a byte-order mark before it is left out.
        name: what errors call it.

    Raises:
        SourceError: it is not JSON, no object, or has a key twice.
    """
    text = text.lstrip(_BOM)
    try:
        parsed = json.loads(text, object_pairs_hook=_object)
    except json.JSONDecodeError as error:
        lines = text.splitlines()
        line = lines[error.lineno - 1].strip()[:60] if error.lineno <= len(lines) else ""
        raise SourceError(
            f"{name}, line {error.lineno}, column {error.colno}: {line!r}",
            why=f"it is not JSON: {error.msg}",
            fix="Comments and trailing commas are not part of JSON",
        ) from None
    except RecursionError:
        raise SourceError(name, why="it is nested too deeply") from None
    if not isinstance(parsed, dict):
        raise SourceError(f"{name} holds {_kind(parsed)}", fix='The whole must be an object: {"...": ...}')
    raise_all([_twice(path) for path in _doubles(parsed, "")], name)
    plain: dict[str, Any] = _plain(parsed, "")
    return plain


def _object(pairs: list[tuple[str, Any]]) -> _Object:
    made = _Object(pairs)
    if len(made) != len(pairs):
        keys = [key for key, _ in pairs]
        made.twice = tuple(sorted({key for key in keys if keys.count(key) > 1}))
    return made


def _doubles(value: Any, prefix: str) -> list[str]:
    if isinstance(value, list):
        return [path for index, entry in enumerate(value) for path in _doubles(entry, f"{prefix[:-1]}[{index}].")]
    if not isinstance(value, _Object):
        return []
    found = [prefix + key for key in value.twice]
    return found + [path for key, entry in value.items() for path in _doubles(entry, f"{prefix}{key}.")]


def _twice(path: str) -> SourceError:
    return SourceError(
        f"Key {path}", why="it stands twice in the same object, and one would win silently", fix="Keep one"
    )


def _plain(value: Any, path: str) -> Any:
    """Copy into plain dicts and lists; a key that is no string is refused."""
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise SourceError(f"Key {key!r} in {path or 'the configuration'}", why="keys are strings")
        return {key: _plain(entry, f"{path}.{key}" if path else key) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(entry, f"{path}[{index}]") for index, entry in enumerate(value)]
    return copy.copy(value)


def _kind(value: Any) -> str:
    return {list: "a list", str: "a string", bool: "true or false", type(None): "null"}.get(type(value), "a number")
