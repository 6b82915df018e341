"""Wheels of every member: built from the tree, complete, honest about what they import, and enough by themselves.

The clean environments see the third-party packages of the environment that runs the tests, through a folder of links,
and nothing of the tree: a member that was not installed from its wheel is not there.
"""

import ast
import email
import os
import re
import site
import subprocess
import sys
import sysconfig
import textwrap
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
import torch

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

ROOT = Path(__file__).resolve().parent.parent
MEMBERS = sorted(
    path.parent
    for pattern in ("pyproject.toml", "*/pyproject.toml", "accelerators/*/pyproject.toml", "plugins/*/pyproject.toml")
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


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    command += ["--disable-pip-version-check", "-w", str(folder)]
    subprocess.run([*command, *map(str, MEMBERS)], check=True, cwd=ROOT, timeout=120)
    return folder


def wheel_of(dist, member):
    name = project(member)["project"]["name"].replace("-", "_")
    return next(dist.glob(f"{name}-[0-9]*.whl"))


def test_every_member_becomes_a_pure_wheel_with_all_its_modules(dist):
    names = {canonical(path.name.split("-")[0]) for path in dist.iterdir()}
    assert names == {project(member)["project"]["name"] for member in MEMBERS}
    for member in MEMBERS:
        wheel = wheel_of(dist, member)
        assert wheel.name.endswith("-py3-none-any.whl")
        package = member / module(member)
        wanted = {str(path.relative_to(member)) for path in package.rglob("*.py")}
        with zipfile.ZipFile(wheel) as archive:
            files = {name for name in archive.namelist() if ".dist-info/" not in name}
        assert {name for name in files if name.endswith(".py")} == wanted
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


@pytest.fixture(scope="module")
def third_party(tmp_path_factory):
    """A folder of links to all that is installed here, but for polyscale."""
    folder = tmp_path_factory.mktemp("third-party")
    for place in dict.fromkeys([*site.getsitepackages(), sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]):
        for entry in Path(place).iterdir() if Path(place).is_dir() else ():
            ours = entry.name.startswith(("polyscale", "__editable__", "_polyscale"))
            if not (ours or entry.suffix == ".pth" or (folder / entry.name).exists()):
                (folder / entry.name).symlink_to(entry)
    return folder


def pip_install(python, dist, *names):
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-index"]
    environ = {key: value for key, value in os.environ.items() if not key.startswith("PIP_")}
    environ |= {"PIP_CONFIG_FILE": os.devnull, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_ROOT_USER_ACTION": "ignore"}
    subprocess.run([*command, "--find-links", str(dist), *names], check=True, timeout=120, env=environ)


def clean_environment(folder, third_party, dist, *names):
    """Install ``names`` from ``dist`` alone; returns the interpreter and what was installed."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=60)
    python = folder / "bin" / "python"
    packages = Path(
        subprocess.run(
            [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
            check=True, capture_output=True, text=True,
        ).stdout.strip()
    )  # fmt: skip
    (packages / "third_party.pth").write_text(f"{third_party}\n")
    pip_install(python, dist, *names)
    return python, {path.name.split("-")[0] for path in packages.glob("polyscale*.dist-info")}


def train(python, folder, *accelerators):
    script = folder / "train.py"
    script.write_text(TRAIN)
    environ = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "POLYSCALE"))}
    done = subprocess.run(
        [python, str(script), str(ROOT), *accelerators],
        cwd=folder, capture_output=True, text=True, timeout=120, env={**environ, "OMP_NUM_THREADS": "1"}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


BASE = {"polyscale_core", "polyscale_backend_cpu", "polyscale_standard", "polyscale_cli"}


def test_core_and_the_cpu_backend_train(dist, third_party, tmp_path):
    python, found = clean_environment(tmp_path / "venv", third_party, dist, "polyscale-core", "polyscale-backend-cpu")
    assert found == BASE
    assert train(python, tmp_path, "cpu", "auto") == ["trained on cpu", "trained on auto"]
    for command in ("scale", "scale-report", "polyscale"):
        assert (python.parent / command).exists()
    # A backend that is not there: the line in the error installs it.
    (refusal,) = train(python, tmp_path, "cuda")
    assert refusal.startswith("PluginError No accelerator 'cuda'")
    (line,) = re.findall(r"pip install [\w-]+", refusal)
    pip_install(python, dist, line.split()[-1])
    (refusal,) = train(python, tmp_path, "cuda")
    assert "No accelerator" not in refusal and "cuda" in refusal


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_core_and_the_cuda_backend_without_a_device_say_so_and_train_on_the_cpu_when_asked(dist, third_party, tmp_path):
    python, found = clean_environment(tmp_path / "venv", third_party, dist, "polyscale-core", "polyscale-backend-cuda")
    assert found == {*BASE, "polyscale_backend_cuda"}
    refusal, trained = train(python, tmp_path, "cuda", "cpu")
    assert refusal.startswith("PluginError")
    assert "'cuda' cannot be used here" in refusal
    assert trained == "trained on cpu"
