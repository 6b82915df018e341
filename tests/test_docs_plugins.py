"""The plugins of docs/adding-a-plugin.md, built as wheels and used as they are printed there."""

import contextlib
import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from polyscale.testing import ranks

MANUAL = Path(__file__).parents[1] / "docs" / "adding-a-plugin.md"
PROJECTS = ("acme-signum", "acme-tools")
OPTIMIZER = {"type": "Signum", "params": {"lr": 0.01}}


def _write_projects(folder):
    """Write every block that is preceded by a path into ``folder``."""
    blocks = re.findall(
        r"^`([\w./-]+)`:\n\n```\w+\n(.*?)^```", MANUAL.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE
    )
    for path, text in blocks:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text, "utf-8")
    assert {path.partition("/")[0] for path, _ in blocks} == set(PROJECTS)


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder with both distributions as an installer leaves them there."""
    from flit_core import buildapi

    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("installed")
    _write_projects(source)
    for project in PROJECTS:
        with _inside(source / project):
            wheel = buildapi.build_wheel(str(source))
        zipfile.ZipFile(source / wheel).extractall(target)
    return target


@contextlib.contextmanager
def _inside(folder):
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


@contextlib.contextmanager
def _on_path(folder):
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))


@pytest.fixture
def on_path(installed):
    with _on_path(installed):
        yield installed


def _configurations():
    blocks = re.findall(r"^```json\n(.*?)^```", MANUAL.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    assert len(blocks) == 2
    return blocks


def _train(folder, config, out):
    import polyscale

    with _on_path(folder):
        config = json.loads(config)
        losses = config.get("backends", {}).get("options", {}).get("losses")
        if losses:
            losses["path"] = f"{out}/{losses['path']}"
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 1)
        with polyscale.initialize(model, config=config) as engine:
            inputs = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))
            mine = inputs.chunk(engine.topology.world_size)[engine.topology.rank]
            for _ in range(3):
                engine.backward((engine(mine) - 1).square().mean())
                engine.step()
            engine.export(f"{out}/model.safetensors")
            engine.save(f"{out}/checkpoint")
            engine.load(f"{out}/checkpoint")
            return dict(engine.parameters_store.iter_full()), type(engine.optimizer).__name__, inputs


def _signum(inputs):
    """Three steps of Signum by hand, in one process."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    momenta = [torch.zeros_like(parameter) for parameter in model.parameters()]
    for _ in range(3):
        gradients = torch.autograd.grad((model(inputs) - 1).square().mean(), list(model.parameters()))
        with torch.no_grad():
            for parameter, momentum, gradient in zip(model.parameters(), momenta, gradients, strict=True):
                momentum.mul_(0.9).add_(0.1 * gradient)
                parameter -= 0.01 * momentum.sign()
    return dict(model.named_parameters())


@pytest.mark.parametrize("number", [0, 1], ids=["optimizer", "all of them"])
def test_the_plugins_train_on_two_ranks(installed, tmp_path, number):
    from safetensors.torch import load_file

    outcomes = ranks(2).run(_train, str(installed), _configurations()[number], str(tmp_path))
    for weights, optimizer, inputs in outcomes:
        assert optimizer == "Signum"
        for name, value in _signum(inputs).items():
            torch.testing.assert_close(weights[name], value.detach(), rtol=0, atol=1e-6)
    exported = load_file(str(tmp_path / "model.safetensors"))
    assert torch.equal(exported["weight"], outcomes[0][0]["weight"])
    if number == 1:
        lines = (tmp_path / "losses.txt").read_text().splitlines()
        assert [line.split()[0] for line in lines] == ["1", "2", "3"]
        assert all(line.endswith(" 0.01") for line in lines)


def test_what_the_page_says_of_the_device_that_is_not_there(on_path):
    from polyscale.discovery import installed, load, select_accelerator
    from polyscale.errors import PluginError

    assert load("accelerator", "acme").why_unavailable() in " ".join(MANUAL.read_text("utf-8").split())
    with pytest.raises(PluginError, match="torch_acme is not installed; pip install torch-acme"):
        select_accelerator("acme")
    assert select_accelerator("auto").name not in ("acme", "acme-stand-in")
    assert {entry.name for entry in installed("accelerator")} >= {"acme", "acme-stand-in"}


def test_the_plugins_refuse_what_they_do_not_know(on_path):
    from polyscale.discovery import load
    from polyscale.errors import ConfigError
    from polyscale.hooks import PluginContext

    with pytest.raises(ConfigError, match=r"optimizer\.params\.beta"):
        load("optimizer", "signum").check({"beta": 0.9})
    with pytest.raises(ConfigError, match=r"backends\.options\.losses\.file"):
        load("observer", "losses", PluginContext("losses", {"file": "x"}))


def test_the_io_backend_moves_bytes_and_says_what_is_short(on_path, tmp_path):
    from polyscale.discovery import load
    from polyscale.errors import PolyscaleError

    io = load("io", "plain")
    written, read = torch.arange(6.0), torch.zeros(6)
    assert io.write_async(written, tmp_path / "file", 8).wait() == 24
    assert io.read_async(read, tmp_path / "file", 8).wait() == 24
    assert torch.equal(written, read)
    assert io.wait() == 2
    with pytest.raises(PolyscaleError, match="16 of 24 bytes"):
        io.read(read, tmp_path / "file", 16)
    with pytest.raises(PolyscaleError, match="missing"):
        io.read(read, tmp_path / "missing")


@pytest.mark.long
def test_pip_installs_the_distributions_and_the_commands_of_the_page_work(tmp_path):
    _write_projects(tmp_path)
    target = tmp_path / "installed"
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-build-isolation", "--no-deps", "--target", target]
    subprocess.run([*install, *(tmp_path / project for project in PROJECTS)], check=True)
    env = {**os.environ, "PYTHONPATH": str(target), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}

    def run(*command):
        done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert "optimizer=signum" in run("scale-report", "--list").splitlines()
    run("scale-report", "--require", "optimizer=signum", "--require", "accelerator=acme-stand-in")
    assert "1 passed" in run(sys.executable, "-m", "pytest", "-q", "-W", "error", "acme-signum/tests")
