"""Wheels of every member: built from the tree, complete, honest about what they import, and enough by themselves."""

import ast
import email
import os
import re
import subprocess
import sys
import textwrap
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
import torch

from polyscale.testing.kernel_modules import find_compiler

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

ROOT = Path(__file__).resolve().parent.parent
MEMBERS = sorted(
    path.parent
    for pattern in (
        "pyproject.toml",
        "*/pyproject.toml",
        "accelerators/*/pyproject.toml",
        "plugins/*/pyproject.toml",
        "csrc/*/pyproject.toml",
    )
    for path in ROOT.glob(pattern)
)
TRAIN = """
import sys, torch, polyscale
from polyscale.errors import PolyscaleError

def train(accelerator):
    torch.manual_seed(0)
    config = {"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
              "zero_optimization": {"stage": 2}, "backends": {"accelerator": accelerator}}
    with polyscale.initialize(torch.nn.Linear(2, 1), config=config) as engine:
        x = torch.ones(4, 2)
        losses = []
        for _ in range(5):
            loss = (engine(x) - 3).square().mean()
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        engine.save(f"checkpoint-{accelerator}")
    assert losses[-1] < losses[0]
    print("trained on", accelerator)

assert "polyscale" in sys.modules and not polyscale.__file__.startswith(sys.argv[1]), polyscale.__file__
for name in sys.argv[2:]:
    try:
        train(name)
    except PolyscaleError as error:
        print(type(error).__name__, error)
"""


def project(member):
    return tomllib.loads((member / "pyproject.toml").read_text(encoding="utf-8"))


def module(member):
    return project(member)["tool"]["flit"]["module"]["name"]


def canonical(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def required(requirements):
    return {canonical(re.match(r"[\w.-]+", text).group()) for text in requirements}


def wheel_of(dist, member):
    name = project(member)["project"]["name"].replace("-", "_")
    return next(dist.glob(f"{name}-[0-9]*.whl"))


def test_every_member_becomes_a_wheel_with_all_its_modules(dist):
    names = {canonical(path.name.split("-")[0]) for path in dist.iterdir()}
    assert names == {project(member)["project"]["name"] for member in MEMBERS}
    for member in MEMBERS:
        wheel = wheel_of(dist, member)
        pure = wheel.name.endswith("-py3-none-any.whl")
        assert pure or member.parent.name == "csrc", "only kernels are compiled"
        package = member / module(member)
        wanted = {str(path.relative_to(member)) for path in package.rglob("*.py")}
        with zipfile.ZipFile(wheel) as archive:
            files = {name for name in archive.namelist() if ".dist-info/" not in name}
        assert {name for name in files if name.endswith(".py")} == wanted
        records = {str(path.relative_to(member)) for path in package.glob("verified.json")}
        assert {name for name in files if name.endswith("verified.json")} == records
        assert all(name.startswith(f"{module(member)}/") for name in files)


def test_metadata_says_what_pyproject_says(dist):
    for member in MEMBERS:
        stated = project(member)["project"]
        with zipfile.ZipFile(wheel_of(dist, member)) as archive:
            text = next(archive.read(name) for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        found = email.message_from_bytes(text)
        assert found["Name"] == stated["name"]
        assert found["Version"] == stated["version"]
        plain = [entry for entry in found.get_all("Requires-Dist", []) if "extra ==" not in entry]
        assert required(plain) == required(stated.get("dependencies", []))


@pytest.mark.parametrize("member", MEMBERS, ids=lambda member: member.name)
def test_what_a_member_imports_it_requires(member):
    stated = project(member)["project"]
    extras = stated.get("optional-dependencies", {}).values()
    declared = required(
        [*stated.get("dependencies", []), *(text for extra in extras for text in extra), stated["name"]]
    )
    owners = {name: {canonical(each) for each in dists} for name, dists in metadata.packages_distributions().items()}
    owners |= {module(other): {project(other)["project"]["name"]} for other in MEMBERS}
    undeclared = {
        f"{path.relative_to(member)}: {name}"
        for path in (member / module(member)).rglob("*.py")
        for name in imported(ast.parse(path.read_text(encoding="utf-8")))
        if name not in sys.stdlib_module_names and not (owners.get(name, {name}) & declared)
    }
    assert not undeclared


def imported(tree):
    """Top-level names that a module imports where it runs; those it can do without (in a try) are left out."""
    found = set()

    def visit(node):
        if isinstance(node, ast.Import):
            found.update(alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found.add(node.module.split(".")[0])
        elif isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            visit_all(node.orelse)
        elif isinstance(node, ast.Try) and any(
            error in ast.unparse(each) for each in node.handlers for error in ("ImportError", "ModuleNotFoundError")
        ):
            visit_all([*node.orelse, *node.finalbody])
        else:
            visit_all(ast.iter_child_nodes(node))

    def visit_all(nodes):
        for node in nodes:
            visit(node)

    visit(tree)
    return found


def test_undeclared_imports_are_found():
    source = """
        from __future__ import annotations
        from typing import TYPE_CHECKING
        import numpy.linalg
        from . import near
        if TYPE_CHECKING:
            import only_for_types
        try:
            import can_do_without
        except ImportError:
            pass
        def later():
            from safetensors import torch
    """
    assert imported(ast.parse(textwrap.dedent(source))) == {"__future__", "typing", "numpy", "safetensors"}


def train(environment, *accelerators):
    script = environment.folder / "train.py"
    script.write_text(TRAIN)
    done = environment.run(environment.python, script, ROOT, *accelerators)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


BASE = {"polyscale_core", "polyscale_backend_cpu", "polyscale_cpu_ops", "polyscale_standard", "polyscale_cli"}


def test_core_and_the_cpu_backend_train(clean_environment, tmp_path):
    environment = clean_environment(tmp_path / "venv", "polyscale-core", "polyscale-backend-cpu")
    assert environment.packages == BASE
    assert train(environment, "cpu", "auto") == ["trained on cpu", "trained on auto"]
    for command in ("scale", "scale-report", "polyscale"):
        assert (environment.python.parent / command).exists()
    # A backend that is not there: the line in the error installs it.
    (refusal,) = train(environment, "cuda")
    assert refusal.startswith("PluginError No accelerator 'cuda'")
    (line,) = re.findall(r"pip install [\w-]+", refusal)
    environment.install(line.split()[-1])
    (refusal,) = train(environment, "cuda")
    assert "No accelerator" not in refusal and "cuda" in refusal


@pytest.mark.long
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_core_and_the_cuda_backend_without_a_device_say_so_and_train_on_the_cpu_when_asked(clean_environment, tmp_path):
    environment = clean_environment(tmp_path / "venv", "polyscale-core", "polyscale-backend-cuda")
    assert environment.packages == {*BASE, "polyscale_backend_cuda", "polyscale_cuda_ops"}
    refusal, trained = train(environment, "cuda", "cpu")
    assert refusal.startswith("PluginError")
    assert "'cuda' cannot be used here" in refusal
    assert trained == "trained on cpu"


USE_A_KERNEL = """
import sys, torch
from polyscale.ops import modules, status, use

(module,) = [module for module in modules() if module.name == "cpu_ops"]
assert not str(module.folder).startswith(sys.argv[1]), module.folder
print(status(module).state, status(module).path.parent.name)
x = torch.zeros(1000)
use("fill_", "cpu")(x, 2.5)
assert torch.equal(x, torch.full((1000,), 2.5))
print(torch._C._dispatch_has_kernel_for_dispatch_key("polyscale::fill_", "CPU"))
"""


def test_the_wheel_of_kernels_needs_no_compiler(clean_environment, dist, tmp_path):
    find_compiler()
    (wheel,) = dist.glob("polyscale_cpu_ops-*.whl")
    assert not wheel.name.endswith("-none-any.whl")
    environment = clean_environment(tmp_path / "venv", "polyscale-cpu-ops")
    done = environment.run(
        environment.python, "-c", USE_A_KERNEL, ROOT, PATH="", CXX="", POLYSCALE_CACHE=str(tmp_path / "cache")
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["prebuilt prebuilt", "True"]
    assert done.stderr == "" and not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("variables", "options", "said"),
    [
        ({"PATH": "", "CXX": ""}, [], "there is no C++ compiler"),
        ({}, ["-C", "prebuilt=no"], ""),
    ],
    ids=["no compiler", "not wanted"],
)
def test_a_wheel_of_kernels_without_a_compiler_is_pure_and_says_so(tmp_path, variables, options, said):
    command = [sys.executable, "-m", "pip", "-v", "wheel", "--no-deps", "--no-build-isolation", "--no-index", *options]
    done = subprocess.run(
        [*command, "-w", tmp_path, ROOT / "csrc" / "cpu_ops"],
        env={**os.environ, **variables}, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert [path.name.split("-", 2)[2] for path in tmp_path.iterdir()] == ["py3-none-any.whl"]
    assert said in done.stdout + done.stderr
