"""Training goes on after a load at another world size or stage as if nothing had happened (fp64, 1e-10)."""

import pytest
import torch
from torch import nn

import polyscale
from polyscale.testing import ranks

GLOBAL_BATCH, BEFORE, AFTER = 6, 3, 3


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(17, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(8, 17, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        hidden = self.embed(x)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return nn.functional.cross_entropy(self.head(hidden), (x + 1) % 17)


def _net():
    torch.manual_seed(4)
    return Net().double()


def _data():
    return torch.arange(200) % 17


def _options():
    return {"lr": 1e-2, "weight_decay": 0.1}


def _train(folder, stage, optimizer, *, load, updates):
    world = torch.distributed.get_world_size()
    config = {
        "train_batch_size": 2 * GLOBAL_BATCH,
        "train_micro_batch_size_per_gpu": GLOBAL_BATCH // world,
        "optimizer": {"type": optimizer, "params": _options()},
        "zero_optimization": {"stage": stage},
        "gradient_clipping": 0.5,
    }
    with polyscale.initialize(_net(), config=config, data=_data(), seed=1) as engine:
        if load:
            engine.load(folder)
        for _ in range(updates):
            engine.train_batch()
        if not load:
            engine.save(folder)
        return dict(engine.parameters_store.iter_full())


def _reference():
    """One process of plain torch over the same samples in the same order."""
    model = _net()
    optimizer = torch.optim.AdamW(model.parameters(), **_options())
    order = iter(polyscale.data.loader(_data(), micro_batch_size=2 * GLOBAL_BATCH, seed=1))
    for _ in range(BEFORE + AFTER):
        optimizer.zero_grad()
        model(next(order)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    return {name: value.detach() for name, value in model.named_parameters()}


@pytest.mark.parametrize(
    ("first", "second"),
    [((2, 1), (1, 0)), ((1, 0), (3, 3)), ((2, 1), (2, 3)), ((2, 3), (2, 0))],
    ids=lambda case: f"{case[0]}-ranks-stage-{case[1]}",
)
def test_going_on_elsewhere_equals_one_process(tmp_path, first, second):
    ranks(first[0]).run(_train, str(tmp_path), first[1], "AdamW", load=False, updates=BEFORE)
    expected = _reference()
    for found in ranks(second[0]).run(_train, str(tmp_path), second[1], "AdamW", load=True, updates=AFTER):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-10)


@pytest.mark.parametrize("optimizer", ["Muon", "Lion", "SGD", "Adagrad"])
def test_every_optimizers_state_is_resharded(tmp_path, optimizer):
    whole = ranks(2).run(_train, str(tmp_path / "whole"), 2, optimizer, load=False, updates=BEFORE + AFTER)[0]
    ranks(2).run(_train, str(tmp_path / "part"), 3, optimizer, load=False, updates=BEFORE)
    for found in ranks(3).run(_train, str(tmp_path / "part"), 1, optimizer, load=True, updates=AFTER):
        for name, value in whole.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-9)
