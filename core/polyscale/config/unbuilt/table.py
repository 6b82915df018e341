"""How a section that is not built is written down: its keys with DeepSpeed's defaults."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

from polyscale.config.section import Status
from polyscale.config.tree import Node


class _Free(Enum):
    FREE = "free"


FREE = _Free.FREE
"""Default of a key below which anything may stand."""
ANY_NAME = "*"
"""Key of a table that describes what stands below every name (or in every entry of a list)."""


def not_built(
    text: str,
    keys: Mapping[str, Any],
    *,
    nearest: str,
    off: tuple[str, tuple[Any, ...]] | None = None,
    presence: bool = False,
) -> Node:
    """Return a section that is refused while it asks for something.

    Args:
        text: what it is for.
        keys: key -> DeepSpeed's default; a mapping is a section of its own, see also FREE and ANY_NAME.
        nearest: what works instead.
        off: the key that turns it on and the values that mean off; default: ``enabled``, where there is one.
        presence: whether it asks for its feature by being there.
    """
    return _section(keys, Status.NOT_BUILT, nearest, text, off, presence)


def no_effect(text: str, keys: Mapping[str, Any], *, reason: str) -> Node:
    """Return a section that is harmless here."""
    return _section(keys, Status.NO_EFFECT, reason, text, None, False)


def _section(
    keys: Mapping[str, Any],
    status: Status,
    reason: str,
    text: str,
    off: tuple[str, tuple[Any, ...]] | None,
    presence: bool,
) -> Node:
    children = {key: _node(value) for key, value in keys.items() if key != ANY_NAME}
    if off is None and not presence:
        off = _switch(children)
    return Node(
        status=status,
        reason=reason,
        text=text,
        children=children,
        each=_node(keys[ANY_NAME]) if ANY_NAME in keys else None,
        switch=off,
        presence=presence,
    )


def _switch(children: Mapping[str, Node]) -> tuple[str, tuple[Any, ...]] | None:
    """Return the usual switches: ``enabled``, which techniques of compression keep in their ``shared_parameters``."""
    if "enabled" in children:
        return "enabled", (False, None)
    if "shared_parameters" in children:
        return "shared_parameters.enabled", (False, None)
    return None


def _node(value: Any) -> Node:
    if value is FREE:
        return Node(free=True, takes_auto=True)
    if isinstance(value, Mapping):
        return _section(value, Status.HONOURED, "", "", None, False)
    return Node(default=value, deepspeed=value, takes_auto=True)
