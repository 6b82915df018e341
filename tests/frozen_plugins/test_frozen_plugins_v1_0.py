"""Plugins written against interface 1.0 still work, each alone and all of them in one training run."""

import contextlib
import sys
from pathlib import Path

import pytest
import torch

from polyscale.discovery import load, plugin_info, select_accelerator
from polyscale.errors import ConfigError, PolyscaleError
from polyscale.testing import ranks

FOLDER = Path(__file__).parent / "v1_0"
PLUGINS = {
    "accelerator": "frozen-device",
    "optimizer": "frozen-sgd",
    "observer": "frozen-lines",
    "io": "frozen-file",
}


@contextlib.contextmanager
def frozen():
    sys.path.insert(0, str(FOLDER))
    try:
        yield
    finally:
        sys.path.remove(str(FOLDER))


@pytest.fixture(autouse=True)
def on_path():
    with frozen():
        yield


@pytest.mark.parametrize("kind", PLUGINS)
def test_plugin_of_interface_1_0_is_loaded(kind):
    info = plugin_info(kind, PLUGINS[kind])
    assert info.interface_version == (1, 0)
    assert (info.installed.distribution, info.installed.version) == ("acme-frozen", "1.0")
    assert load(kind, PLUGINS[kind])


def test_accelerator_is_chosen_by_name_only():
    assert select_accelerator("frozen-device").memory().peak == 3
    assert select_accelerator("auto").name != "frozen-device"


def test_io_moves_bytes(tmp_path):
    io = load("io", "frozen-file")
    written, read = torch.arange(6.0), torch.zeros(6)
    assert io.write_async(written, tmp_path / "file", 8).wait() == 24
    assert io.read(read, tmp_path / "file", 8) == 24
    assert torch.equal(written, read)
    assert io.wait() == 1
    with pytest.raises(PolyscaleError, match="16 of 24 bytes"):
        io.read(read, tmp_path / "file", 16)


def train(path):
    import polyscale

    with frozen():
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 2)
        before = model.weight.detach().clone()
        data = torch.randn(4, 3, generator=torch.Generator().manual_seed(1))
        config = {
            "train_batch_size": 4,
            "optimizer": {"type": "frozen-sgd", "params": {"lr": 0.5}},
            "zero_optimization": {"stage": 2},
            "backends": {
                "accelerator": "frozen-device",
                "io": "frozen-file",
                "options": {"frozen-lines": {"path": path}},
            },
        }
        engine = polyscale.initialize(model, config=config)
        mine = data.chunk(engine.topology.world_size)[engine.topology.rank]
        for _ in range(2):
            engine.backward(engine(mine).square().mean())
            engine.step()
        weights = dict(engine.parameters_store.iter_full())
        engine.close()
    return before, data, weights["weight"].clone()


def test_all_of_them_train_a_model_together(tmp_path):
    path = tmp_path / "events"
    (before, data, weight), (_, _, same) = ranks(2).run(train, str(path))
    torch.manual_seed(0)
    reference = torch.nn.Linear(3, 2)
    assert torch.equal(reference.weight, before)
    for _ in range(2):
        gradients = torch.autograd.grad(reference(data).square().mean(), list(reference.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(reference.parameters(), gradients, strict=True):
                parameter -= 0.5 * gradient
    torch.testing.assert_close(weight, reference.weight.detach(), rtol=0, atol=1e-6)
    assert torch.equal(weight, same)
    assert path.read_text().splitlines() == ["started 2 2 8", "step 1 False", "step 2 False", "closed 2"]


def test_optimizer_checks_its_own_parameters():
    with pytest.raises(ConfigError, match=r"optimizer\.params\.momentum"):
        load("optimizer", "frozen-sgd").check({"momentum": 0.9})
