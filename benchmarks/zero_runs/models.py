"""The model and its data: GPT-2 of transformers without dropout, built from its configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

SEED = 0
BATCHES = 8


@dataclass(frozen=True)
class Shape:
    """Sizes of the model, and of the micro-batch of one rank."""

    layers: int
    width: int
    heads: int
    vocabulary: int
    positions: int
    micro: int
    length: int


SHAPES = {
    "17m": Shape(layers=4, width=512, heads=8, vocabulary=8192, positions=256, micro=2, length=128),
    "tiny": Shape(layers=2, width=32, heads=2, vocabulary=64, positions=16, micro=2, length=8),
}


def build(shape: Shape) -> Any:
    """The model, in fp32, with the same values in every process."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(SEED)
    return GPT2LMHeadModel(
        GPT2Config(
            n_layer=shape.layers, n_embd=shape.width, n_head=shape.heads, vocab_size=shape.vocabulary,
            n_positions=shape.positions, bos_token_id=0, eos_token_id=0, use_cache=False,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )
    )  # fmt: skip


def count(shape: Shape) -> int:
    """Number of parameters; nothing is allocated."""
    import torch

    with torch.device("meta"):
        return sum(parameter.numel() for parameter in build(shape).parameters())


def batches(shape: Shape, rank: int) -> list[torch.Tensor]:
    """The batches (micro x length, int64) that ``rank`` takes in turn."""
    import torch

    generator = torch.Generator().manual_seed(SEED + rank)
    size = (shape.micro, shape.length)
    return [torch.randint(0, shape.vocabulary, size, generator=generator) for _ in range(BATCHES)]
