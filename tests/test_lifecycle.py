"""Engines come and go: nothing stays behind, and two at once do not disturb each other."""

import gc
import threading
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import polyscale
from polyscale.testing import ranks

HYBRID = {"topology": {"dp_replicate": 2, "dp_shard": -1}}


def _config(stage, **extra):
    return {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": stage},
        **extra,
    }


def _model(seed, width=32):
    torch.manual_seed(seed)
    blocks = [nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(2)]
    return nn.Sequential(nn.Sequential(*blocks), nn.Linear(width, 1))


def _step(engine, value):
    width = 32
    engine.backward(engine(torch.full((2, width), value)).square().mean())
    engine.step()


def _resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def _ten_engines():
    survivors, sizes = [], []
    for index in range(10):
        model = _model(index)
        engine = polyscale.initialize(model, config=_config(index % 4))
        _step(engine, 0.5)
        survivors += [weakref.ref(engine), weakref.ref(model), weakref.ref(engine.optimizer)]
        survivors.append(weakref.ref(engine.parameters_store))
        engine.close()
        del engine, model
        gc.collect()
        sizes.append(_resident())
    threads = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
    return [reference() is None for reference in survivors], sizes, threads


def test_ten_engines_leave_nothing():
    for dead, sizes, threads in ranks(2).run(_ten_engines):
        assert all(dead)
        assert sizes[-1] - sizes[4] < 8 * 2**20, "memory is flat after the first few"
        assert not [name for name in threads if "polyscale" in name.lower()]


def _ten_hybrid_engines(stage):
    groups = []
    for index in range(10):
        with polyscale.initialize(_model(index), config=_config(stage, **HYBRID)) as engine:
            _step(engine, 0.5)
            assert engine.topology.group("checkpoint") is not None
            assert engine.parameters_store.get_full("1.weight").shape == (1, 32)
        groups.append(len(dist.distributed_c10d._world.pg_map))
    return groups


@pytest.mark.long
@pytest.mark.parametrize("stage", [1, 3])
def test_ten_hybrid_engines_make_the_groups_of_one(stage):
    for groups in ranks(4).run(_ten_hybrid_engines, stage):
        assert groups == groups[:1] * 10


def _interleaved(stages, extra):
    alone = {}
    for stage in stages:
        with polyscale.initialize(_model(stage), config=_config(stage, **extra)) as engine:
            for value in (0.1, 0.2, 0.3, 0.4):
                _step(engine, value)
            alone[stage] = dict(engine.parameters_store.iter_full())
    first, second = (polyscale.initialize(_model(stage), config=_config(stage, **extra)) for stage in stages)
    for value in (0.1, 0.2, 0.3):
        _step(first, value)
        _step(second, value)
    _step(first, 0.4)
    together = {stages[0]: dict(first.parameters_store.iter_full())}
    first.close()
    _step(second, 0.4)  # closing one does not harm the other
    together[stages[1]] = dict(second.parameters_store.iter_full())
    second.close()
    return alone, together


@pytest.mark.parametrize(
    ("world", "stages", "extra"),
    [(2, (0, 3), {}), *(pytest.param(4, order, HYBRID, marks=pytest.mark.long) for order in ((1, 3), (3, 1)))],
    ids=str,
)
def test_two_engines_interleave(world, stages, extra):
    for alone, together in ranks(world).run(_interleaved, stages, extra):
        for stage, weights in alone.items():
            for name, value in weights.items():
                assert torch.equal(value, together[stage][name]), (stage, name)
