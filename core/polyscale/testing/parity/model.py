"""The small awkward model of the parity suite, and its data.

Notable: sizes are odd (13 tokens, width 16, inner width 22), so that shards are uneven; repeated blocks, so that units
are found; no value whose gradient is zero by construction, because optimizers that take a sign would amplify rounding.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from polyscale.testing.parity.cases import BATCH, Task

VOCABULARY = 13
WIDTH = 16
INNER = 22
LENGTH = 5
BLOCKS = 3
NOT_HIDDEN = ("embedding", "head")
"""Modules whose matrices Muon leaves to AdamW: the first and the last layer (Jordan et al. 2024)."""


class Block(nn.Module):
    """A residual block; (batch, length, width) to the same."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, INNER)
        self.down = nn.Linear(INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Add the block's output to ``x``."""
        out: Tensor = x + self.down(functional.gelu(self.up(self.norm(x))))
        return out


class ParityModel(nn.Module):
    """Embedding, blocks, head, and the awkward parts that ``task`` asks for."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        self.reuse = task.reuse
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.branch = nn.Linear(WIDTH, WIDTH) if task.branch != "none" else None
        self.idle = nn.Linear(WIDTH, 3) if task.idle else None
        self.empty = nn.Parameter(torch.empty(0, WIDTH)) if task.empty else None
        for parameter in self.parameters():
            nn.init.normal_(parameter, mean=float(parameter.ndim == 1) * 0.5, std=0.2)
        if task.tied:
            self.head.weight = self.embedding.weight
        if task.frozen:
            self.blocks[1].requires_grad_(False)
            self.blocks[2].get_parameter("up.bias").requires_grad_(False)
            self.norm.weight.requires_grad_(False)

    def forward(self, x: Tensor, y: Tensor, branch: bool = False) -> Tensor:
        """Mean cross-entropy of predicting ``y`` from ``x``, both int64 of shape (batch, length)."""
        hidden = self.embedding(x)
        if self.empty is not None:
            hidden = hidden + self.empty.sum(0)
        for block in self.blocks:
            hidden = block(hidden)
        if self.reuse:
            hidden = self.blocks[0](hidden)
        if branch and self.branch is not None:
            hidden = hidden + functional.gelu(self.branch(hidden))
        logits = self.head(self.norm(hidden)).flatten(0, 1)
        logits = logits.float() if logits.dtype == torch.bfloat16 else logits
        return functional.cross_entropy(logits, y.flatten())


def make_model(task: Task) -> ParityModel:
    """The model with its first weights: the same values in every dtype and process."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1234)
        model = ParityModel(task)
    return model.double() if task.dtype == "fp64" else model


def batch_of(step: int, micro: int, rank: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of one micro-step of one rank, int64 of shape (BATCH, LENGTH)."""
    generator = torch.Generator().manual_seed(10_000 * step + 100 * micro + rank)
    x, y = torch.randint(0, VOCABULARY, (2, BATCH, LENGTH), generator=generator)
    return x, y
