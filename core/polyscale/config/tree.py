"""The tree of known keys, built from pydantic models or from the tables of what is not built yet.

Notable: unknown keys, "auto" values and statuses are found on this tree, before any value is looked at, so they are
reported together and in the words of the file. A plugin's own model takes part without being a :class:`Section`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from polyscale.config.section import NEW, SAME, Status

REQUIRED = object()
"""Default of a key that must be given."""


@dataclass(frozen=True)
class Node:
    """One known key.

    Attributes:
        default: what holds when it is absent.
        status: what becomes of it.
        reason: why it has no effect, or the nearest thing that works.
        text: a sentence about it.
        deepspeed: DeepSpeed's default; NEW where DeepSpeed has no such key.
        children: keys below it.
        each: what stands below every name or index, where names are free.
        free: whether anything may stand below.
        switch: the key below that turns it on (dotted), and the values that mean off.
        presence: whether it is on by being there.
        takes_auto: whether "auto" is one of its own values.
    """

    default: Any = None
    status: Status = Status.HONOURED
    reason: str = ""
    text: str = ""
    deepspeed: Any = None
    children: Mapping[str, Node] = field(default_factory=dict)
    each: Node | None = None
    free: bool = False
    switch: tuple[str, tuple[Any, ...]] | None = None
    presence: bool = False
    takes_auto: bool = False

    def is_on(self, value: Any) -> bool:
        """Whether ``value`` asks for something, beyond what the default does."""
        if value is None:
            return False
        if not isinstance(value, Mapping):
            refused = value is False and (self.default is None or bool(self.children))
            return bool(value != self.default) and not refused
        if self.switch is not None:
            key, off = self.switch
            return _switch_value(self, value, key) not in off
        if self.presence:
            return True
        if self.each is not None:
            return any(self.each.is_on(entry) for entry in value.values())
        if not self.children:
            return bool(value != self.default)
        return any(self.children[key].is_on(entry) for key, entry in value.items() if key in self.children)


def misshapen(node: Node, value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield (path, value) of what stands where an object is expected; None and False leave a section out."""
    if not (node.children or node.each) or value is None or value is False:
        return
    if isinstance(value, list) and node.each is not None:
        return
    if not isinstance(value, Mapping):
        yield path, value
        return
    for key, entry in value.items():
        if key in node.children:
            yield from misshapen(node.children[key], entry, f"{path}.{key}")


def _switch_value(node: Node, value: Any, path: str) -> Any:
    for key in path.split("."):
        node = node.children[key]
        value = value.get(key, node.default) if isinstance(value, Mapping) else node.default
    return value


def asked_for(node: Node, value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Node]]:
    """Yield (path, key) of the set keys that are not simply honoured: the outermost ones that ask for something."""
    for key, entry in value.items():
        child, path = node.children.get(key), f"{prefix}{key}"
        if child is None:
            continue
        if child.status is Status.HONOURED:
            yield from _below(child, entry, path)
        elif child.status is Status.NO_EFFECT:
            if child.switch is None or child.is_on(entry):
                yield path, child
        elif child.is_on(entry) and not (child.children and not isinstance(entry, Mapping)):
            yield path, child


def _below(node: Node, value: Any, path: str) -> Iterator[tuple[str, Node]]:
    if isinstance(value, Mapping) and node.children:
        yield from asked_for(node, value, path + ".")


@cache
def model_tree(model: type[BaseModel]) -> Node:
    """Return the keys of a model, those of the models in it included."""
    return Node(children={name: _field_node(info) for name, info in model.model_fields.items()}, **_switch(model))


def _switch(model: type[BaseModel]) -> dict[str, Any]:
    switch = getattr(model, "switch", None)
    return {
        "switch": switch if isinstance(switch, tuple) else None,
        "presence": bool(getattr(model, "presence", False)),
    }


def _field_node(info: FieldInfo) -> Node:
    extra = info.json_schema_extra if isinstance(info.json_schema_extra, dict) else {}
    default = REQUIRED if info.is_required() else info.get_default(call_default_factory=True, validated_data={})
    plain = default.model_dump() if isinstance(default, BaseModel) else default
    deepspeed: Any = extra.get("deepspeed", NEW)
    return Node(
        default=plain,
        status=Status(extra.get("status", Status.HONOURED)),
        reason=str(extra.get("reason", "")),
        text=info.description or "",
        deepspeed=plain if deepspeed is SAME else deepspeed,
        takes_auto=bool(extra.get("takes_auto")) or _takes_auto(info.annotation, default),
        **_inside(info.annotation),
    )


def _inside(annotation: Any) -> dict[str, Any]:
    """Return what may stand below a value of this type, as arguments of :class:`Node`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        node = model_tree(annotation)
        return {"children": node.children, "switch": node.switch, "presence": node.presence}
    origin, arguments = get_origin(annotation), get_args(annotation)
    if annotation is Any or annotation is dict:
        return {"free": True}
    if origin in (list, dict, tuple, set, frozenset) and arguments:
        below = _inside(arguments[-1] if origin is dict else arguments[0])
        if below.get("children"):
            return {"each": Node(**below)}
        return {"free": True} if origin is dict else {}
    for argument in arguments if origin is not Literal else ():
        found = _inside(argument)
        if found:
            return found
    return {}


def _takes_auto(annotation: Any, default: Any) -> bool:
    if get_origin(annotation) is Literal:
        return "auto" in get_args(annotation)
    return default == "auto" or any(_takes_auto(argument, None) for argument in get_args(annotation))
