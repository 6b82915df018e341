"""Where the transport of shared memory cannot be built on the spot, zero trains over gloo as it says."""

import pytest
import torch
from torch import nn

import polyscale
from polyscale.testing import ranks_once


def train(stage, communication):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage},
        "backends": {"accelerator": "cpu", "communication": communication, "data_parallel": "zero"},
    }
    with polyscale.initialize(model, config=config) as engine:
        for _ in range(2):
            engine.backward(engine(torch.ones(2, 8)).square().mean())
            engine.step()
        print("trained", engine.steps, flush=True)


@pytest.mark.parametrize(
    ("stage", "communication", "world"),
    [(2, "auto", 2), (2, "auto", 1), *(pytest.param(s, "shm", 2, marks=pytest.mark.long) for s in (1, 3))],
)
def test_a_compiler_that_fails(tmp_path, stage, communication, world):
    environ = {"CXX": "/bin/false", "POLYSCALE_CACHE": str(tmp_path / "cache")}
    outcomes = ranks_once(world, train, stage, communication, timeout=150, env=environ)
    for each in outcomes:
        assert each.returncode == 0 and "trained 2" in each.stdout, each.stderr
        assert "Traceback" not in each.stderr
    said = "".join(each.stderr for each in outcomes)
    assert said.count("groups use gloo") == (world > 1)


def test_a_cache_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    environ = {"POLYSCALE_CACHE": str(tmp_path / "file" / "cache")}
    outcomes = ranks_once(2, train, 2, "auto", timeout=150, env=environ)
    assert [each.returncode for each in outcomes] == [0, 0], outcomes[0].stderr
    assert "it cannot be written" in outcomes[0].stderr and "POLYSCALE_CACHE" in outcomes[0].stderr
