"""Sixteen bits: overflow is agreed by all ranks, pinned parameters keep their dtype, masters do not drift."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import polyscale
from polyscale.testing import ranks

STAGES = (0, 1, 2, 3)


def _config(stage, precision, **extra):
    return {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
        "zero_optimization": {"stage": stage},
        precision: {"enabled": True, **extra},
    }


def _line():
    model = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(model.weight)
    return model


def _one_rank_overflows():
    rank = dist.get_rank()
    found = {}
    for stage in STAGES:
        config = _config(stage, "fp16", initial_scale_power=4, hysteresis=1, loss_scale_window=2)
        with polyscale.initialize(_line(), config=config) as engine:
            history = []
            for value in (1.0, float("inf"), 1.0, 1.0):
                inputs = torch.full((1, 2), value if rank == 1 else 1.0)
                engine.backward(engine(inputs).sum())
                updated = engine.step()
                history.append((updated, engine.loss_scale, engine.parameters_store.get_full("weight").tolist()))
            found[stage] = history, engine.steps, engine.skipped
    return found


def test_inf_on_one_rank_skips_the_update_on_all():
    for outcome in ranks(2).run(_one_rank_overflows):
        for stage in STAGES:
            history, steps, skipped = outcome[stage]
            assert [entry[0] for entry in history] == [True, False, True, True]
            # 16, halved by the overflow, doubled after two good updates in a row.
            assert [entry[1] for entry in history] == [16.0, 8.0, 8.0, 16.0]
            assert [entry[2] for entry in history] == [[[-0.5, -0.5]], [[-0.5, -0.5]], [[-1.0, -1.0]], [[-1.5, -1.5]]]
            assert (steps, skipped) == (3, 1)


class _TwoParts(nn.Module):
    def __init__(self):
        super().__init__()
        self.good, self.bad = nn.Linear(2, 1), nn.Linear(2, 1)

    def forward(self, good, bad):
        return self.good(good).sum() + self.bad(bad).sum()


def _at_the_floor(stage):
    config = _config(stage, "fp16", initial_scale_power=1, hysteresis=1, min_loss_scale=1)
    config["backends"] = {"options": {"fp16": {"max_skips_at_floor": 3}}}
    engine = polyscale.initialize(_TwoParts(), config=config)
    bad = float("inf") if dist.get_rank() == 1 else 1.0
    try:
        for _ in range(10):
            engine.backward(engine(torch.ones(1, 2), torch.full((1, 2), bad)))
            engine.step()
    except polyscale.PolyscaleError as error:
        return engine.skipped, str(error)
    finally:
        engine.close()
    return None


@pytest.mark.parametrize("stage", [0, 2])
def test_skips_at_the_floor_end_with_the_name_of_the_first_bad_parameter(stage):
    for skipped, text in ranks(2).run(_at_the_floor, stage):
        assert 3 <= skipped <= 6
        assert "bad.weight" in text and "floor" in text


class _NormedBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.norm, self.seen = nn.Linear(4, 4), nn.LayerNorm(4), None
        self.norm.register_forward_pre_hook(self._look)

    def _look(self, norm, inputs):
        self.seen = inputs[0].dtype, norm.weight.dtype

    def forward(self, x):
        x = self.layer(x)
        assert x.dtype == torch.bfloat16
        return self.norm(x)


class _Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(_NormedBlock() for _ in range(2))
        self.batch = nn.BatchNorm1d(4)
        self.seen = []

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
            self.seen.append((x.dtype, block.seen[1]))
        self.seen.append((x.dtype, self.batch.weight.dtype))
        return self.batch(x).square().mean()


def _pinned():
    found = {}
    for stage in STAGES:
        torch.manual_seed(0)
        config = _config(stage, "bf16")
        config["data_types"] = {"keep_in_fp32_modules": ["blocks.*.norm.*", "batch.*"]} if stage % 2 else {}
        model = _Normed()
        with polyscale.initialize(model, config=config) as engine:
            engine.backward(engine(torch.ones(3, 4) * (1 + dist.get_rank())))
            assert engine.step()
            masters = {name: value.dtype for name, value in engine.parameters_store.iter_full()}
            found[stage] = model.seen, masters
    return found


def test_pinned_parameters_compute_in_fp32_and_batch_norm_is_pinned_by_itself():
    for outcome in ranks(2).run(_pinned):
        for stage in STAGES:
            seen, masters = outcome[stage]
            norm = torch.float32 if stage % 2 else torch.bfloat16
            assert seen == [(torch.bfloat16, norm), (torch.bfloat16, norm), (torch.bfloat16, torch.float32)], stage
            assert set(masters.values()) == {torch.float32}


def _small_updates():
    found = {}
    for stage in STAGES:
        config = _config(stage, "bf16")
        config["optimizer"]["params"]["lr"] = 2.0**-12
        model = nn.Linear(2, 1, bias=False)
        nn.init.ones_(model.weight)
        with polyscale.initialize(model, config=config) as engine:
            for _ in range(16):
                engine.backward(engine(torch.ones(1, 2)).sum())
                engine.step()
            found[stage] = engine.parameters_store.get_full("weight").tolist()
    return found


def test_updates_smaller_than_bf16_can_hold_reach_the_masters():
    for outcome in ranks(2).run(_small_updates):
        for stage in STAGES:
            assert outcome[stage] == [[1 - 2.0**-8] * 2], stage


def test_fp16_with_bf16_is_refused():
    config = {**_config(0, "fp16"), "bf16": {"enabled": True}}
    with pytest.raises(polyscale.ConfigError, match="fp16"):
        polyscale.initialize(_line(), config=config)
