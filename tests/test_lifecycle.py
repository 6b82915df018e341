"""Engines come and go: nothing stays behind, and two at once do not disturb each other."""

import gc
import threading
import weakref
from pathlib import Path

import torch
from torch import nn

import polyscale
from polyscale.testing import ranks


def _config(stage):
    return {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": stage},
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


def _interleaved():
    alone = {}
    for stage in (0, 3):
        with polyscale.initialize(_model(stage), config=_config(stage)) as engine:
            for value in (0.1, 0.2, 0.3):
                _step(engine, value)
            alone[stage] = dict(engine.parameters_store.iter_full())
    first = polyscale.initialize(_model(0), config=_config(0))
    second = polyscale.initialize(_model(3), config=_config(3))
    for value in (0.1, 0.2, 0.3):
        _step(first, value)
        _step(second, value)
    together = {
        0: dict(first.parameters_store.iter_full()),
        3: dict(second.parameters_store.iter_full()),
    }
    first.close()
    _step(second, 0.4)  # closing one does not harm the other
    second.close()
    return alone, together


def test_two_engines_interleave():
    for alone, together in ranks(2).run(_interleaved):
        for stage, weights in alone.items():
            for name, value in weights.items():
                assert torch.equal(value, together[stage][name]), (stage, name)
