"""Models that tests share."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import GPT2LMHeadModel


def tiny_gpt2(*, layers: int = 3, width: int = 32, vocabulary: int = 256, positions: int = 64) -> GPT2LMHeadModel:
    """A Hugging Face GPT-2 with random weights and no dropout; 48,480 parameters by default, head tied.

    Weights come from torch's default generator. ``model(input_ids=x, labels=x).loss`` is the usual loss; ``x`` is
    int64 of shape (batch, at most ``positions``).
    """
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=vocabulary,
        n_positions=positions,
        n_embd=width,
        n_layer=layers,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    return GPT2LMHeadModel(config)
