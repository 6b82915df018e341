"""Find the keys that nobody knows, at any depth, with the nearest known one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from polyscale.config.errors import UnknownKeyError
from polyscale.config.tree import Node
from polyscale.errors import nearest


def remove_unknown(tree: Node, values: dict[str, Any], top_level: Iterable[str]) -> list[UnknownKeyError]:
    """Take unknown keys out of ``values`` and return an error for each.

    Args:
        tree: the known keys.
        values: changed in place, so that what is left can be checked further.
        top_level: every name that may stand at the top, for the nearest one.
    """
    found = list(_walk(tree, values, ""))
    errors = []
    for path, owner, key, siblings in found:
        del owner[key]
        names = list(top_level) if owner is values else list(siblings)
        where = "" if owner is values else path.removesuffix(f".{key}")
        errors.append(UnknownKeyError(f"Unknown key {path}", fix=_fix(tree, key, where=where, names=names)))
    return errors


def _fix(tree: Node, key: str, *, where: str, names: list[str]) -> str:
    """Say what may have been meant: a key spelt nearly so, or one of the same name in another section."""
    close = nearest(key, names)
    if close:
        return f"Did you mean {close!r}?"
    elsewhere = [f"{name}.{key}" for name, child in tree.children.items() if key in child.children]
    if elsewhere:
        return f"Did you mean {' or '.join(elsewhere)}?"
    if where:
        return f"Known in {where}: {', '.join(names)}"
    return "`scale config explain FILE` lists the keys of the top level; docs/configuration.md describes them"


def _walk(node: Node, value: Any, prefix: str) -> Iterator[tuple[str, dict[str, Any], str, Mapping[str, Node]]]:
    if isinstance(value, list) and node.each is not None:
        for index, entry in enumerate(value):
            yield from _walk(node.each, entry, f"{prefix[:-1]}[{index}].")
    if not isinstance(value, dict):
        return
    for key, entry in value.items():
        child = node.children.get(key) or node.each
        if child is not None:
            yield from _walk(child, entry, f"{prefix}{key}.")
        elif not node.free and node.children:
            yield f"{prefix}{key}", value, key, node.children
