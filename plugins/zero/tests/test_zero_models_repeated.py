"""The asynchronous cases again and again: many tiny units, whose collectives overlap with one another."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import polyscale
from polyscale.testing import ranks

pytestmark = pytest.mark.long
WIDTH, UNITS, STEPS, TIMES = 3, 12, 3, 20


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.rand(1))

    def forward(self, x):
        return x + torch.tanh(self.layer(x)) * self.scale


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(UNITS))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x, order):
        for number in order:
            x = self.blocks[number](x)
        return self.head(x)


def _net():
    torch.manual_seed(1)
    return Net().double()


def _order(step):
    """All blocks, some of them twice, in an order that changes."""
    generator = torch.Generator().manual_seed(step // 2)
    return torch.randint(0, UNITS, (UNITS + 4,), generator=generator).tolist()


def _input(step, rank):
    return torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(9 * step + rank)).double()


def _reference(world):
    model = _net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        for micro in range(2):
            for rank in range(world):
                (model(_input(2 * step + micro, rank), _order(step)).square().mean() / (2 * world)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.detach() for name, value in model.named_parameters()}


ZERO = [
    {},
    {"stage3_prefetch_bucket_size": 10**9},
    {"stage3_prefetch_bucket_size": 40, "stage3_max_reuse_distance": 40, "reduce_bucket_size": 1},
]


def _train(stage, communication, zero, times):
    found = []
    for _ in range(times):
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": 2,
            "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}},
            "zero_optimization": {"stage": stage, **zero},
            "backends": {"accelerator": "cpu", "data_parallel": "zero", "communication": communication},
        }
        with polyscale.initialize(_net(), config=config) as engine:
            for step in range(STEPS):
                for micro in range(2):
                    output = engine(_input(2 * step + micro, dist.get_rank()), _order(step))
                    engine.backward(output.square().mean())
                    engine.step()
            found.append(dict(engine.parameters_store.iter_full()))
    return found


@pytest.mark.parametrize("zero", ZERO, ids=["plain", "far ahead", "small"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_overlapping_collectives(stage, communication, zero):
    expected = _reference(2)
    for found in ranks(2, backend=communication).run(_train, stage, communication, zero, TIMES, timeout=300):
        for weights in found:
            for name, value in expected.items():
                torch.testing.assert_close(weights[name], value, rtol=0, atol=1e-10, msg=name)


def test_overlapping_collectives_on_four_ranks(communication):
    expected = _reference(4)
    for found in ranks(4, backend=communication).run(_train, 3, communication, ZERO[1], 3, timeout=300):
        for weights in found:
            for name, value in expected.items():
                torch.testing.assert_close(weights[name], value, rtol=0, atol=1e-10, msg=name)
