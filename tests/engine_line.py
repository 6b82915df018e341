"""The smallest engine there is: a line through the origin, under SGD without momentum, at any stage; and a block."""

import torch
from torch import nn

import polyscale

STAGES = (0, 1, 2, 3)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x):
        return x + torch.tanh(self.layer(x))


def config_of(stage, **extra):
    base = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage},
        "backends": {"data_parallel": "ddp" if stage == 0 else "fsdp2"},  # zero has tests of its own
    }
    return {**base, **extra}


def line_at(stage, **extra):
    model = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(model.weight)
    return polyscale.initialize(model, config=config_of(stage, **extra))


def weight_of(engine):
    return engine.parameters_store.get_full("weight").flatten().tolist()
