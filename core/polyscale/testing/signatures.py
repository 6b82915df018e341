"""Signatures of a module that is not here: read from its syntax tree, and kept as a file beside the tests that need it.

Notable: nothing is imported, so a vendor's wheel can be read on a machine without the vendor's hardware or libraries.
The file says which version was read and where, so that it can be read again for a newer one and compared.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Record:
    """What a device's module has.

    Attributes:
        module: its name in use ("torch.acme").
        version: version of what was read.
        source: where it was read.
        names: name -> signature. A function: "(device=None)". A class: the signature of its construction; its methods
            are "Stream.synchronize". Annotations are left out.
    """

    module: str
    version: str
    source: str
    names: Mapping[str, str] = field(default_factory=dict)

    def write(self, path: Path) -> None:
        """Write it as JSON, names in order."""
        path.write_text(
            json.dumps({**asdict(self), "names": dict(sorted(self.names.items()))}, indent=1) + "\n", "utf-8"
        )

    def without(self, *names: str) -> Record:
        """The same without ``names``; a class goes with its methods."""
        gone = tuple(f"{name}." for name in names)
        kept = {name: text for name, text in self.names.items() if name not in names and not name.startswith(gone)}
        return Record(self.module, self.version, self.source, kept)


def read_record(path: Path) -> Record:
    """Read what :meth:`Record.write` wrote."""
    return Record(**json.loads(path.read_text("utf-8")))


def signatures(sources: Iterable[str], *, exported: Iterable[str] | None = None) -> dict[str, str]:
    """Name -> signature of the public functions and classes at the top level of ``sources``.

    Args:
        sources: texts of the module's files. Of a name that several define, the last counts.
        exported: names to keep; None: all that do not start with an underscore.
    """
    kept = None if exported is None else set(exported)
    found: dict[str, str] = {}
    for source in sources:
        for node in ast.parse(source).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and _public(node.name, kept):
                found.update(_of_class(node) if isinstance(node, ast.ClassDef) else {node.name: _signature(node)})
    return found


def exported_names(source: str) -> list[str]:
    """What ``__all__`` of a source text lists; [] where it has none."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets):
            return [str(name) for name in ast.literal_eval(node.value)]
    return []


def _public(name: str, kept: set[str] | None) -> bool:
    return not name.startswith("_") if kept is None else name in kept


def _of_class(node: ast.ClassDef) -> dict[str, str]:
    methods = {item.name: item for item in node.body if isinstance(item, ast.FunctionDef)}
    maker = methods.get("__new__") or methods.get("__init__")
    found = {node.name: "()" if maker is None else _signature(maker, bound=True)}
    found |= {f"{node.name}.{name}": _signature(item, bound=True) for name, item in _callable_methods(methods)}
    return found


def _callable_methods(methods: Mapping[str, ast.FunctionDef]) -> Iterator[tuple[str, ast.FunctionDef]]:
    for name, item in methods.items():
        if not item.decorator_list and (not name.startswith("_") or name in ("__enter__", "__exit__")):
            yield name, item


def _signature(node: ast.FunctionDef, *, bound: bool = False) -> str:
    arguments = node.args
    for one in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]:
        if one is not None:
            one.annotation = None
    if bound:
        (arguments.posonlyargs or arguments.args).pop(0)
    return f"({ast.unparse(arguments)})"
