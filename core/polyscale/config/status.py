"""What is said about set keys that are not simply honoured: refusals and notes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from polyscale.config.errors import NotBuiltError, raise_all
from polyscale.config.section import Status
from polyscale.config.tree import Node, asked_for


@dataclass(frozen=True)
class Finding:
    """One set key that is not simply honoured.

    Attributes:
        path: dotted path.
        value: what it was set to.
        status: what becomes of it.
        reason: why it has no effect, or the nearest thing that works.
    """

    path: str
    value: Any
    status: Status
    reason: str

    @property
    def is_note(self) -> bool:
        """Whether it is harmless."""
        return self.status is Status.NO_EFFECT

    def covered_by(self, honoured: Iterable[str]) -> bool:
        """Whether ``honoured`` names this key or a section around it."""
        return any(self.path == key or self.path.startswith(key + ".") for key in honoured)

    def error(self) -> NotBuiltError:
        """Return the refusal of this key."""
        if self.status is Status.NEEDS_PLUGIN:
            why = "none of the chosen plugins honours it, and it changes what is computed or stored"
        else:
            why = "it is known, and not built yet in this version of polyscale"
        shown = f" = {self.value!r}" if not isinstance(self.value, Mapping) else ""
        return NotBuiltError(
            f"{self.path}{shown}", why=why, fix=f"Remove it or turn it off; the nearest that works: {self.reason}"
        )


def findings(tree: Node, values: Mapping[str, Any]) -> list[Finding]:
    """Return what is to be said about the set keys of ``values``, in their order."""
    return [Finding(path, _value(values, path), node.status, node.reason) for path, node in asked_for(tree, values)]


def refuse_unhonoured(found: Iterable[Finding], honoured: frozenset[str], source: str) -> None:
    """Raise for the keys that need a plugin and that ``honoured`` does not cover."""
    raise_all([f.error() for f in found if f.status is Status.NEEDS_PLUGIN and not f.covered_by(honoured)], source)


def _value(values: Mapping[str, Any], path: str) -> Any:
    value: Any = values
    for key in path.split("."):
        value = value[key]
    return value
