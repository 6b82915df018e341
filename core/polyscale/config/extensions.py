"""Top-level sections that are not fields of Config: those of plugins, and those of DeepSpeed that are not built.

Notable: names come from the metadata of installed distributions; a plugin's model is imported only when its key is
set. A plugin's section wins over the table of what is not built.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import EntryPoint, entry_points

from pydantic import BaseModel

from polyscale.config import unbuilt
from polyscale.config.tree import Node, model_tree
from polyscale.errors import PluginError

GROUP = "polyscale.config"


def installed() -> dict[str, list[EntryPoint]]:
    """Return the sections of plugins by name; more than one entry is a conflict. Nothing is imported."""
    found: dict[str, list[EntryPoint]] = {}
    for entry in entry_points(group=GROUP):
        if entry.value not in {other.value for other in found.get(entry.name, [])}:
            found.setdefault(entry.name, []).append(entry)
    return found


def extra_nodes(names: Iterable[str]) -> tuple[dict[str, Node], dict[str, type[BaseModel]]]:
    """Return the known keys of the set top-level ``names``, and the models of those that a plugin registered.

    Raises:
        PluginError: a plugin's section cannot be loaded, is claimed twice, or is no pydantic model.
    """
    plugins = installed()
    nodes: dict[str, Node] = {}
    models: dict[str, type[BaseModel]] = {}
    for name in names:
        if name in plugins:
            models[name] = _load(name, plugins[name])
            nodes[name] = _section_node(models[name])
        elif name in unbuilt.NAMES:
            nodes[name] = unbuilt.node(name)
    return nodes, models


def _section_node(model: type[BaseModel]) -> Node:
    node = model_tree(model)
    free = model.model_config.get("extra") == "allow"
    return Node(text=(model.__doc__ or "").split("\n")[0], children=node.children, free=free)


def _load(name: str, entries: list[EntryPoint]) -> type[BaseModel]:
    owners = [f"{entry.dist.name if entry.dist else '?'} ({entry.value})" for entry in entries]
    if len(entries) > 1:
        raise PluginError(
            f"The configuration section {name!r}",
            why=f"several distributions claim it: {', '.join(owners)}",
            fix="Uninstall all but one",
        )
    from polyscale.discovery.quiet import run_plugin_code

    label = f"The configuration section {name!r} of {owners[0]}"
    fix = "Repair or uninstall that distribution"
    model = run_plugin_code(label, f"importing {entries[0].value}", entries[0].load, fix=fix)
    if not (isinstance(model, type) and issubclass(model, BaseModel)):
        raise PluginError(label, why="it is no pydantic model class", fix=fix)
    return model
