"""Models that are hard to spread: at stages 1 to 3 on 2 ranks each trains as one process of plain torch does (fp64)."""

import pytest
import torch
from zero_models import ROWS, WIDTH
from zero_scenarios import ALL, MORE_STEPS, Place

import polyscale
from polyscale.testing import ranks

STAGES = (1, 2, 3)
STEPS = 3
SGD = {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}}


def _input(step, rank):
    generator = torch.Generator().manual_seed(10 * step + rank + 1)
    return torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)


def _make(name):
    torch.manual_seed(1)
    return ALL[name][0]().double()


def _config(stage, communication, **extra):
    base = {
        "train_micro_batch_size_per_gpu": ROWS,
        "optimizer": SGD,
        "zero_optimization": {"stage": stage},
        "backends": {"accelerator": "cpu", "data_parallel": "zero", "communication": communication},
    }
    return base | extra


def _reference(name, world=2):
    """One process of plain torch: a backward for each rank, whose losses are averaged. No recompute."""
    model = _make(name)
    for module in model.modules():
        if hasattr(module, "reentrant"):
            module.reentrant = False
    options = SGD["params"]
    optimizer = torch.optim.SGD(model.parameters(), **options)
    for step in range(MORE_STEPS.get(name, STEPS)):
        for rank in range(world):
            ALL[name][1](Place(model, model, lambda loss: (loss / world).backward(), step, rank, _input(step, rank)))
        optimizer.step()
        optimizer.zero_grad()
    return {key: value.detach() for key, value in model.named_parameters(remove_duplicate=False)}


def _train(name, communication, stages=STAGES, extra=None):
    found = {}
    for stage in stages:
        with polyscale.initialize(_make(name), config=_config(stage, communication, **(extra or {}))) as engine:
            rank = engine.topology.rank
            for step in range(MORE_STEPS.get(name, STEPS)):
                x = _input(step, rank)
                ALL[name][1](Place(engine, engine.module, engine.backward, step, rank, x))
                assert engine.step()
            found[stage] = {key: value.clone() for key, value in engine.parameters_store.iter_full()}
    return found


def _check(found, expected):
    for stage, weights in found.items():
        assert weights.keys() == expected.keys()
        for key, value in expected.items():
            torch.testing.assert_close(
                weights[key], value, rtol=1e-10, atol=1e-10, msg=lambda text, s=stage, k=key: f"stage {s}: {k}: {text}"
            )


QUICK = {
    "a head idle on one rank",
    "one graph twice with two inputs",
    "other paths at some steps",
    "a module in two units",
    "an object, eval between",
    "units return dataclass",
    "lists and dicts as arguments",
    "units return view of its parameter",
    "reentrant recompute: block twice",
}


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.long) for name in ALL]
)
def test_trains_as_one_process_does(name, communication):
    expected = _reference(name)
    for found in ranks(2, backend=communication).run(_train, name, communication):
        _check(found, expected)
