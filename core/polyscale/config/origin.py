"""Where each value comes from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

OriginKind = Literal["file", "environment", "argument", "default", "auto"]


@dataclass(frozen=True)
class Origin:
    """Where a value comes from.

    Attributes:
        kind: "file", "environment", "argument" (a dict, JSON text, or a keyword), "default" or "auto".
        detail: the file, the variable, or how an "auto" was resolved.
    """

    kind: OriginKind
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.kind} ({self.detail})" if self.detail else self.kind


@dataclass(frozen=True)
class Note:
    """A set key that is harmless here, and why it changes nothing."""

    key: str
    reason: str


DEFAULT = Origin("default")


def leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted path, value) of everything that is not a non-empty mapping."""
    for key, value in tree.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            yield from leaves(value, path + ".")
        else:
            yield path, value


def all_origins(values: Mapping[str, Any], known: Mapping[str, Origin]) -> dict[str, Origin]:
    """Return the origin of every leaf; what nobody set is a default."""
    return {path: known.get(path, DEFAULT) for path, _ in leaves(values)}
