"""Every value of a configuration with its origin, its status, and what differs from DeepSpeed's default.

Notable: what ``scale config explain`` prints. Rows come in the order of the sections; a section that is not built has
rows only where it is set.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from polyscale.config.config import Config
from polyscale.config.extensions import extra_nodes
from polyscale.config.origin import DEFAULT, Origin
from polyscale.config.section import NEW, Status
from polyscale.config.tree import REQUIRED, Node, model_tree

NOT_IN_DEEPSPEED = "-"
"""In place of DeepSpeed's default, where it has no such key."""


@dataclass(frozen=True)
class Row:
    """One value.

    Attributes:
        path: dotted path.
        value: the value in effect.
        origin: where it comes from.
        deepspeed_default: DeepSpeed's default; "-" where it has no such key or no default.
        differs: whether the value is another than DeepSpeed's default.
        status: "honoured", "no effect here", "needs a plugin that honours it" or "not built yet".
        note: a sentence about the key, or why it has no effect.
    """

    path: str
    value: Any
    origin: Origin
    deepspeed_default: Any
    differs: bool
    status: str = Status.HONOURED.value
    note: str = ""


def explain(config: Config) -> list[Row]:
    """Return a row for every value of ``config``, sections in order."""
    values = config.as_dict()
    core = model_tree(Config)
    extra, _ = extra_nodes(name for name in values if name not in core.children)
    tree = Node(children={**core.children, **extra})
    return list(_rows(tree, values, config.origins, ""))


def _rows(
    node: Node, values: Mapping[str, Any], origins: Mapping[str, Origin], prefix: str, inherited: Node | None = None
) -> Iterator[Row]:
    for key, value in values.items():
        child = node.children.get(key) or node.each or Node(default=REQUIRED, deepspeed=NEW, free=True)
        path = f"{prefix}{key}"
        owner = child if inherited is None else inherited
        if owner.status is Status.HONOURED:
            owner = child
        if isinstance(value, Mapping) and value:
            yield from _rows(child, value, origins, path + ".", owner if owner.status is not Status.HONOURED else None)
        else:
            yield _row(path, child, owner, value, origins)


def _row(path: str, node: Node, owner: Node, value: Any, origins: Mapping[str, Origin]) -> Row:
    absent = node.deepspeed is NEW or node.default is REQUIRED
    return Row(
        path=path,
        value=value,
        origin=origins.get(path, DEFAULT),
        deepspeed_default=NOT_IN_DEEPSPEED if absent else node.deepspeed,
        differs=not absent and value != node.deepspeed,
        status=owner.status.value,
        note=owner.reason or node.text,
    )
