"""Stop and resume equals going on, bit by bit; and a checkpoint loads at any world size and stage."""

import pytest
import torch
from torch import nn

import polyscale
from polyscale.testing import ranks

STAGES = (0, 1, 2, 3)
QUICK = [*(("fp32", stage) for stage in STAGES), ("bf16", 3), ("fp16", 2)]
ALL = [(dtype, stage) for dtype in ("fp32", "bf16", "fp16") for stage in STAGES]
RESUMED = [case if case in QUICK else pytest.param(*case, marks=pytest.mark.long) for case in ALL]
FIRST, SECOND = 3, 3


class Net(nn.Module):
    """Blocks with dropout and a buffer, a tied weight, an empty and an idle parameter."""

    def __init__(self, dropout=0.2):
        super().__init__()
        self.embed = nn.Embedding(13, 8)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(dropout), nn.Linear(16, 8)) for _ in range(2)
        )
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 13, bias=False)
        self.head.weight = self.embed.weight
        self.idle = nn.Linear(8, 3)
        self.empty = nn.Parameter(torch.empty(4, 0))

    def forward(self, x):
        hidden = self.embed(x)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return nn.functional.cross_entropy(self.head(self.norm(hidden)), x)


def _config(stage, **extra):
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 5}},
        "zero_optimization": {"stage": stage},
        "gradient_clipping": 1.0,
        **extra,
    }


def _make(stage, seed=7, dropout=0.2, **extra):
    torch.manual_seed(3)
    data = torch.arange(400) % 13
    return polyscale.initialize(Net(dropout), config=_config(stage, **extra), data=data, seed=seed)


def _train(engine, updates):
    iterator = iter(engine.data)
    history = []
    for _ in range(updates):
        loss = engine.train_batch(iterator)
        history.append((float(loss), engine.learning_rates(), engine.grad_norm, engine.samples))
    return history


def _state(engine):
    weights = dict(engine.parameters_store.iter_full())
    moments = dict(engine.parameters_store.iter_full("exp_avg"))
    return weights, moments, torch.get_rng_state(), engine.module.norm.running_mean.clone()


def _stop_and_resume(folder, stage, extra):
    with _make(stage, **extra) as engine:
        _train(engine, FIRST)
        engine.save(folder, client_state={"epoch": 1, "names": ["a"]})
        expected = _train(engine, SECOND), _state(engine)
    with _make(stage, seed=99, **extra) as engine:
        with torch.no_grad():
            for name, value in list(engine.parameters_store.iter_full()):
                engine.parameters_store.set_full(name, value + 1.0)
        report = engine.load(folder)
        found = _train(engine, SECOND), _state(engine)
    return expected, found, report


@pytest.mark.parametrize(("dtype", "stage"), RESUMED)
def test_resuming_equals_going_on(tmp_path, stage, dtype):
    extra = {} if dtype == "fp32" else {dtype: {"enabled": True}}
    for expected, found, report in ranks(2).run(_stop_and_resume, str(tmp_path), stage, extra):
        assert expected[0] == found[0], "losses, learning rates, norms, samples"
        for before, after in zip(expected[1][:2], found[1][:2], strict=True):
            assert before.keys() == after.keys()
            for name in before:
                assert torch.equal(before[name], after[name]), name
        assert torch.equal(expected[1][2], found[1][2]), "random numbers"
        assert torch.equal(expected[1][3], found[1][3]), "buffers"
        assert {"parameters", "optimizer", "scheduler", "rng", "data", "counters"} <= set(report.restored)
        assert not report.absent and not report.ignored
        assert report.client_state == {"epoch": 1, "names": ["a"]}


def _save(folder, stage):
    with _make(stage, dropout=0.0) as engine:
        _train(engine, FIRST)
        engine.save(folder)
        return _state(engine)[:2]


def _load_and_go_on(folder, stage, updates):
    with _make(stage, dropout=0.0, seed=1) as engine:
        report = engine.load(folder)
        loaded = _state(engine)[:2]
        _train(engine, updates)
        return loaded, report, engine.steps, _state(engine)[:2]


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [((2, 1), (1, 0)), ((1, 0), (3, 3)), ((2, 1), (2, 3)), ((2, 3), (2, 0)), ((2, 2), (4, 1))],
    ids=lambda case: f"{case[0]}-ranks-stage-{case[1]}",
)
def test_any_world_size_and_stage_loads_any_other(tmp_path, saved, loaded):
    (world, stage), (new_world, new_stage) = saved, loaded
    weights, moments = ranks(world).run(_save, str(tmp_path), stage)[0]
    for (new_weights, new_moments), report, steps, _ in ranks(new_world).run(
        _load_and_go_on, str(tmp_path), new_stage, 1
    ):
        assert steps == FIRST + 1
        assert {"parameters", "optimizer", "scheduler", "data"} <= set(report.restored)
        assert new_weights.keys() == weights.keys() and "head.weight" in weights
        for name, value in weights.items():
            assert torch.equal(value, new_weights[name]), name
        assert moments.keys() == new_moments.keys() and "idle.weight" not in moments
        for name, value in moments.items():
            assert torch.equal(value, new_moments[name]), name
    if world != new_world:
        assert any("rng" in name for name in report.absent), "it is said that random numbers were not restored"


def _export(folder, stage):
    with _make(stage) as engine:
        _train(engine, 1)
        engine.export(f"{folder}/model.safetensors")
        return dict(engine.parameters_store.iter_full()), {k: v.clone() for k, v in engine.module.named_buffers()}


@pytest.mark.parametrize("stage", STAGES)
def test_export_has_exactly_the_keys_and_values_of_the_model(tmp_path, stage):
    from safetensors.torch import load_file

    weights, buffers = ranks(2).run(_export, str(tmp_path), stage)[0]
    found = load_file(str(tmp_path / "model.safetensors"))
    assert found.keys() == Net().state_dict().keys()
    for name, value in {**weights, **buffers}.items():
        assert torch.equal(found[name], value), name
