"""The hooks manual says what the code says: every hook, every member of every Protocol, every class of the interfaces.

The tables are compared with the sources as text, so a change of a signature or of a docstring shows here. A failure
prints the lines that belong into ``docs/hooks.md``.
"""

import ast
import importlib
import inspect
import re
from pathlib import Path

import pytest

from polyscale.hooks import HookSpecs, PluginContext, hookspec
from polyscale.kinds import KINDS

MANUAL = Path(__file__).parents[1] / "docs" / "hooks.md"
# What a kind's Protocol is given or gives, beside the classes of its own module.
ALSO = {"optimizer": ["polyscale.parameters.store", "polyscale.parameters.info"]}

USUAL = {"name": "the plugin's name, that of its entry point."}


def _tree(cls):
    module = ast.parse(Path(inspect.getsourcefile(cls)).read_text("utf-8"))
    return next(node for node in module.body if isinstance(node, ast.ClassDef) and node.name == cls.__name__)


def _first_paragraph(text):
    return " ".join(re.split(r"\n\s*\n|\n\s*(?:Args|Attributes|Raises|Returns):", text or "", maxsplit=1)[0].split())


def _attributes(node):
    """Name -> text of the section "Attributes" of a class's docstring."""
    _, _, section = (ast.get_docstring(node) or "").partition("Attributes:\n")
    found = re.findall(r"^    (\w+): (.*(?:\n      +.*)*)", section, flags=re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in found}


def signature(node):
    """Name, arguments and result of a method, without self, as written in the source."""
    arguments = re.sub(r"^self(, )?", "", ast.unparse(node.args))
    arguments = re.sub(r"(?<=\S)=(?=\S)", " = ", arguments)
    if any(isinstance(mark, ast.Name) and mark.id == "property" for mark in node.decorator_list):
        return f"{node.name}: {ast.unparse(node.returns)}"
    return f"{node.name}({arguments}) -> {ast.unparse(node.returns)}"


def members(cls):
    """(declaration, what it means) of each public member, in the order of the source."""
    node = _tree(cls)
    texts = _attributes(node)
    found = []
    for entry in node.body:
        if isinstance(entry, ast.AnnAssign):
            name = entry.target.id
            found.append((f"{name}: {ast.unparse(entry.annotation)}", texts.get(name, USUAL.get(name, ""))))
        elif isinstance(entry, ast.FunctionDef) and not entry.name.startswith("_"):
            found.append((signature(entry), _first_paragraph(ast.get_docstring(entry))))
    return found


def table(cls):
    """The lines of the manual about one class."""
    described = members(cls)
    if not described:
        return ""
    if not _attributes(_tree(cls)) and all(": " in declaration.partition("(")[0] for declaration, _ in described):
        return f"`{cls.__name__}({', '.join(declaration for declaration, _ in described)})`"
    rows = [f"| `{_cell(declaration)}` | {_cell(_plain(text))} |" for declaration, text in described]
    return "\n".join(["| member | meaning |", "|---|---|", *rows])


def _cell(text):
    return text.replace("|", r"\|")


def _plain(text):
    text = re.sub(r":\w+:`~?([\w.]+)`", lambda found: f"`{found[1].rpartition('.')[2]}`", text)
    return text.replace("``", "`")


def classes(kind):
    """The Protocol of a kind first, then every other public class of its module and of those in ALSO."""
    protocol = kind.protocol_type()
    names = [protocol.__module__, *ALSO.get(kind.name, [])]
    found = [protocol]
    for name in names:
        module = importlib.import_module(name)
        own = [value for value in vars(module).values() if isinstance(value, type) and value.__module__ == name]
        found += [cls for cls in own if cls is not protocol and not cls.__name__.startswith("_")]
    return found


def hook(kind):
    """The hook of a kind, as a plugin writes it."""
    node = next(entry for entry in _tree(HookSpecs).body if getattr(entry, "name", "") == kind.hook)
    return f"@hookimpl\ndef {kind.hook}({ast.unparse(node.args)}) -> {ast.unparse(node.returns)}: ..."


def facts(kind):
    """The line of the manual that says where a kind is found."""
    major, minor = kind.version
    where = kind.protocol.replace(":", ".")
    return f"Group `{kind.group}`; interface version `({major}, {minor})`; Protocol `{where}`."


def section(kind):
    """The part of the manual about one kind, up to the next heading of its rank."""
    found = re.search(rf"^## {kind.name}\n(.*?)(?=^## |\Z)", MANUAL.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    assert found, f"docs/hooks.md has no section '## {kind.name}'"
    return found[1]


@pytest.mark.parametrize("kind", KINDS.values(), ids=lambda kind: kind.name)
def test_the_manual_has_the_hook_and_the_members_of_each_kind(kind):
    text = section(kind)
    expected = [facts(kind), hook(kind), *filter(None, map(table, classes(kind)))]
    missing = [part for part in expected if part not in text]
    assert not missing, f"docs/hooks.md, section {kind.name}, lacks:\n" + "\n\n".join(missing)
    rows = [line for part in expected for line in part.splitlines() if line.startswith("| `")]
    stale = [line for line in text.splitlines() if line.startswith("| `") and line not in rows]
    assert not stale, f"docs/hooks.md, section {kind.name}, has what the code has not:\n" + "\n".join(stale)


def test_the_manual_has_every_kind_and_no_other():
    headings = re.findall(r"^## (\w+)$", MANUAL.read_text("utf-8"), flags=re.MULTILINE)
    assert [name for name in headings if name in KINDS] == list(KINDS)
    specs = [name for name, value in vars(HookSpecs).items() if getattr(value, hookspec.project_name + "_spec", None)]
    assert sorted(specs) == sorted(kind.hook for kind in KINDS.values())


def test_the_manual_has_the_context():
    assert table(PluginContext) in MANUAL.read_text("utf-8"), table(PluginContext)
