"""What counting alone reaches on a text: the losses that a language model must beat to have learned anything.

Notable: counts are of the training part and losses of the validation part. The bigram is interpolated with the unigram
(Jelinek and Mercer 1980); the weight is chosen on the last tenth of the training part, never on what is scored.
"""

from __future__ import annotations

import torch
from torch import Tensor

_WEIGHTS = tuple(step / 20 for step in range(1, 20))


def losses(training: Tensor, validation: Tensor, vocabulary: int) -> tuple[float, float]:
    """Mean loss in nats per token of a unigram and of an interpolated bigram model.

    Args:
        training: token ids of shape (samples, length).
        validation: token ids of the same shape; all but the first of a sample are predicted, as a model does.
        vocabulary: number of token ids.
    """
    held = max(1, len(training) // 10)
    counts = _counts(training[:-held], vocabulary)
    weight = min(_WEIGHTS, key=lambda weight: _bigram(counts, training[-held:], weight))
    counts = _counts(training, vocabulary)
    return _bigram(counts, validation, 0.0), _bigram(counts, validation, weight)


def _counts(rows: Tensor, vocabulary: int) -> Tensor:
    """Counts of pairs: entry (a, b) is how often b follows a; each token is the second of a pair once."""
    pairs = rows[:, :-1] * vocabulary + rows[:, 1:]
    return torch.bincount(pairs.flatten(), minlength=vocabulary**2).view(vocabulary, vocabulary).double()


def _bigram(counts: Tensor, rows: Tensor, weight: float) -> float:
    """Mean loss of ``weight`` * P(b | a) + (1 - ``weight``) * P(b), where P(b) has one added to each count."""
    single = counts.sum(0) + 1
    single /= single.sum()
    after = counts.sum(1)
    first, second = rows[:, :-1], rows[:, 1:]
    seen = after[first] > 0
    pair = counts[first, second] / after[first].clamp(min=1)
    mixed = torch.where(seen, weight * pair + (1 - weight) * single[second], single[second])
    return -mixed.log().mean().item()
