"""Where weights come from: real, deferred and meta-device models start alike at any number of ranks and any stage."""

import pytest
import torch
from torch import nn

import polyscale
from polyscale.testing import ranks, tiny_gpt2

STAGES = (0, 1, 2, 3)
CONFIG = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}}


def _weights(start, stage):
    torch.manual_seed(5)
    if start == "meta":
        with torch.device("meta"):
            model = tiny_gpt2()
    elif start == "deferred":
        with polyscale.partitioned_init():
            model = tiny_gpt2()
    else:
        model = tiny_gpt2()
    config = {**CONFIG, "zero_optimization": {"stage": stage}}
    with polyscale.initialize(model, config=config, seed=11) as engine:
        buffers = {name: buffer.clone() for name, buffer in engine.module.named_buffers()}
        return {**dict(engine.parameters_store.iter_full()), **buffers}


def _all(starts, stages):
    return {(start, stage): _weights(start, stage) for start in starts for stage in stages}


def _same(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


@pytest.mark.long
def test_starts_do_not_depend_on_world_size_or_stage():
    reference = {start: _weights(start, 0) for start in ("eager", "deferred", "meta")}
    _same(reference["deferred"], reference["eager"])
    for world, stages in ((1, (1, 3)), (2, STAGES), (4, (0, 3))):
        for found in ranks(world).run(_all, ("eager", "deferred", "meta"), stages, timeout=120):
            for (start, _stage), weights in found.items():
                _same(weights, reference[start])


class _Plain(nn.Module):
    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.layer = nn.Linear(8, 8)
        self.register_buffer("shift", torch.rand(3))


def _unseeded_ranks(stage):
    rank = torch.distributed.get_rank()
    with polyscale.initialize(_Plain(rank), config={**CONFIG, "zero_optimization": {"stage": stage}}) as engine:
        return engine.parameters_store.get_full("layer.weight"), engine.module.shift.clone()


@pytest.mark.parametrize("stage", [0, 3])
def test_ranks_that_were_not_seeded_alike_start_with_rank_0s_weights(stage):
    expected = _Plain(0)
    for weight, shift in ranks(2).run(_unseeded_ranks, stage):
        assert torch.equal(weight, expected.layer.weight)
        assert torch.equal(shift, expected.shift)
