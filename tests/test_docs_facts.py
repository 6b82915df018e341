"""What README and docs state in tables and prose agrees with the code."""

import ast
import re
from pathlib import Path

import pluggy
import pytest

from polyscale.discovery import installed, load
from polyscale.hooks import PROJECT, HookSpecs, hookimpl
from polyscale.kinds import KINDS

ROOT = Path(__file__).parents[1]


def _text(name):
    return (ROOT / name).read_text("utf-8")


def _rows(name, head):
    """Cells of the table whose first line is ``head``."""
    found = re.search(rf"^{re.escape(head)}\n\|[-|]+\|\n((?:\|.*\n)+)", _text(name), flags=re.MULTILINE)
    assert found, f"{name} has no table {head}"
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in found[1].splitlines()]


def _code(cell):
    return re.findall(r"`([^`]+)`", cell)


def _own():
    names = {path.parent: path for path in [*ROOT.glob("*/pyproject.toml"), *ROOT.glob("*/*/pyproject.toml")]}
    return {re.search(r'^name = "(.+)"$', path.read_text(), flags=re.MULTILINE)[1]: path for path in names.values()}


def test_the_table_of_packages():
    rows = _rows("README.md", "| package | import | command |")
    own = {name: path.read_text("utf-8") for name, path in _own().items()}
    own["polyscale"] = _text("pyproject.toml")
    assert {_code(row[0])[0] for row in rows} == set(own)
    for package, module, command in rows:
        text = own[_code(package)[0]]
        if _code(package) != ["polyscale"]:
            assert _code(module) == re.findall(r'^\[tool.flit.module\]\nname = "(.+)"$', text, flags=re.MULTILINE)
        _, _, scripts = text.partition("[project.scripts]\n")
        for name in re.findall(r"^([\w-]+) = ", scripts.partition("\n\n")[0], flags=re.MULTILINE):
            assert name in _code(command)


def test_the_table_of_backends(tmp_path, monkeypatch):
    from polyscale_cli.report.verified import verified

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))  # what this machine's own tests recorded is not in the table
    rows = _rows("docs/backends.md", "| kind | name | distribution | what it is | verified |")
    own = _own()
    expected = [
        [kind, entry.name, entry.distribution, verified(kind, entry.name, entry.value)]
        for kind in KINDS
        for entry in installed(kind)
        if entry.distribution in own
    ]
    assert [[row[0], *_code(row[1]), row[2], row[4]] for row in rows] == expected


def test_the_table_of_accelerators():
    rows = _rows("docs/backends.md", "| accelerator | communication, best first | chosen by `auto` |")
    for row in rows:
        assert _code(row[1]) == list(load("accelerator", _code(row[0])[0]).communications)
    assert {_code(row[0])[0] for row in rows} == {
        entry.name for entry in installed("accelerator") if entry.distribution in _own()
    }


@pytest.mark.parametrize(
    ("cell", "config"),
    [
        ("offload to host or NVMe", {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}),
        ("offload to host or NVMe", {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}),
        ("quantized communication (ZeRO++)", {"zero_optimization": {"stage": 3, "zero_quantized_weights": True}}),
        ("MiCS", {"zero_optimization": {"stage": 3, "mics_shard_size": 2}}),
        ("pipeline", {"pipeline": {"stages": 2}}),
        ("sequence", {"sequence_parallel_size": 2}),
        ("the `tensor_parallel` section", {"tensor_parallel": {"autotp_size": 2}}),
        ("profiler", {"flops_profiler": {"enabled": True}}),
        ("autotuning", {"autotuning": {"enabled": True}}),
        ("1-bit optimizers", {"optimizer": {"type": "OneBitAdam"}}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_the_readme_calls_not_yet_is_refused(cell, config):
    import torch

    import polyscale

    assert any(cell in row[2] for row in _rows("README.md", "| | now | not yet |"))
    with pytest.raises(polyscale.PolyscaleError) as error:
        polyscale.initialize(torch.nn.Linear(2, 2), config={"train_batch_size": 1, **config})
    assert error.value.fix


def test_the_names_of_the_engine_exist():
    import torch

    import polyscale

    cells = " ".join(row[1] for row in _rows("README.md", "| DeepSpeed | polyscale |"))
    named = set(re.findall(r"engine\.(\w+)", cells + _text("docs/training.md").replace("polyscale.engine.", "")))
    with polyscale.initialize(torch.nn.Linear(2, 2), config={"train_batch_size": 1}) as engine:
        assert named - set(dir(engine)) == set()
        stored = set(re.findall(r"(?:parameters_store|store)\.(\w+)", cells + _text("docs/training.md")))
        assert stored - set(dir(engine.parameters_store)) == set()
    assert {"save", "load", "export", "flush", "grad_norm"} <= named


def test_what_the_tour_points_at_is_there():
    sections = re.findall(r"^## \d\. \[(.+?)\]\(\.\./(.+?)\)\n(.*?)(?=^## )", _text("docs/tour.md"), flags=re.S | re.M)
    assert len(sections) == 6
    for shown, target, text in sections:
        assert shown == target
        source = _text(target)
        for name in _code(text):
            if "/" in name:
                assert (ROOT / name).exists(), name
            elif name.endswith(".py"):
                assert (ROOT / target).with_name(name).exists(), name
            else:
                assert re.search(rf"\b{re.escape(name.rpartition('.')[2])}\b", source), f"{target} has no {name}"
    total = sum(len(_text(target).splitlines()) for _, target, _ in sections)
    stated = int(re.search(r"about (\d+) lines", _text("docs/tour.md"))[1])
    assert stated == pytest.approx(total, rel=0.15)


def test_the_map_names_folders_that_exist():
    block = _text("README.md").partition("## Map\n\n```\n")[2].partition("```")[0]
    named = set(re.findall(r"^(\w+)/", block, flags=re.MULTILINE))
    assert all((ROOT / name).is_dir() for name in named)
    assert {path.relative_to(ROOT).parts[0] for path in _own().values()} <= named


def test_the_folders_of_the_map_list_their_members():
    text = _text("README.md")
    for folder in ("accelerators", "plugins"):
        line = re.search(rf"^{folder}/ .*$", text, flags=re.MULTILINE)[0]
        members = [path.parent.name for path in (ROOT / folder).glob("*/pyproject.toml")]
        assert members and all(re.search(rf"\b{name}\b", line) for name in members)


def test_the_reason_for_one_manager_per_plugin_stands():
    """docs/adr/0001: in a shared manager one misspelt hook fails the check of every later plugin."""
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(HookSpecs)

    class Misspelt:
        @hookimpl
        def polyscale_acelerator(self, context): ...

    class Good:
        @hookimpl
        def polyscale_io(self, context): ...

    manager.register(Misspelt(), name="accelerator:misspelt")
    with pytest.raises(pluggy.PluginValidationError):
        manager.check_pending()
    manager.register(Good(), name="io:good")
    with pytest.raises(pluggy.PluginValidationError, match="polyscale_acelerator"):
        manager.check_pending()


def test_every_environment_variable_of_the_manual_is_read():
    manuals = (("training", "| variable | meaning |"), ("sim", "| variable | meaning | default |"))
    named = {_code(row[0])[0] for page, head in manuals for row in _rows(f"docs/{page}.md", head)}
    sources = [*ROOT.glob("*/*/env.py"), *ROOT.glob("*/*/*/env.py")]
    constants = {
        node.value
        for source in sources
        for node in ast.walk(ast.parse(source.read_text("utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("POLYSCALE_")
    }
    assert named == constants
