"""``partitioned_init``: build a model that does not fit, with the weights that an eager construction gives.

Notable: nothing in torch or ``torch.nn`` is replaced. Under the context large tensors are meta tensors with a recording
(:mod:`polyscale.parameters.deferred_log`), and the random generator moves exactly as it does eagerly; each weight is
computed from its recording when it is wanted, one at a time, and equals the eager one bit by bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from polyscale.errors import PolyscaleError
from polyscale.parameters.deferred_facade import is_recording
from polyscale.parameters.deferred_log import drop_history, history_of, reference
from polyscale.parameters.deferred_recorder import Recorder
from polyscale.parameters.deferred_replay import replay_reference


@contextmanager
def partitioned_init(*, threshold: int = 1024) -> Iterator[None]:
    """Build a model inside without holding its weights; then hand it to ``polyscale.initialize``.

    Floating tensors of at least ``threshold`` elements become meta tensors with a recording; smaller ones, integers and
    what is read from files or NumPy stay real. At most one weight is in memory at a time, plus what an initialiser
    itself makes. Inside, everything may be done to the weights; between the context and ``initialize``, nothing: an
    operator outside is not recorded, so casts (``model.to(torch.bfloat16)``) belong inside. ``initialize`` refuses a
    weight that was edited, cast or moved outside. It cannot see edits through ``.data``, whose version counter is
    another one, nor ``torch.nn.init.trunc_normal_``, ``orthogonal_``, ``sparse_`` and ``dirac_``, which skip meta
    tensors, nor that a model is a ``copy.deepcopy`` made outside, whose weights have no recording. A context inside
    another is part of the outer one.

    Args:
        threshold: smallest number of elements that is deferred.

    Raises:
        PolyscaleError: ``threshold`` is not a positive number.
    """
    if not isinstance(threshold, int) or isinstance(threshold, bool) or threshold < 1:
        raise PolyscaleError(
            f"partitioned_init(threshold={threshold!r})",
            why="it is a number of elements",
            fix="Give a whole number from 1; 1024 is the default",
        )
    if is_recording():
        yield
        return
    with Recorder(threshold=threshold).recording():
        yield


def is_deferred(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is a meta tensor whose values can be replayed."""
    return history_of(tensor) is not None


def replay(tensor: torch.Tensor, device: torch.device | str | None = None) -> torch.Tensor:
    """Compute the values of a deferred tensor.

    Deterministic; the global random state is untouched, and nothing is kept: a second call computes again.

    Args:
        tensor: a tensor for which :func:`is_deferred` holds (a Parameter, a buffer, or a view of one).
        device: where to; None: cpu.

    Returns:
        A plain tensor of the same shape, strides and dtype, without gradient.

    Raises:
        PolyscaleError: ``tensor`` has no recording.
    """
    history = history_of(tensor)
    if history is None:
        raise PolyscaleError(
            f"replay of a tensor of shape {tuple(tensor.shape)} on {tensor.device}",
            why="it was not made under partitioned_init, or was changed after it, or forgotten",
            fix="Build the model inside 'with polyscale.partitioned_init():', casts and all",
        )
    value = replay_reference(reference(tensor, history))
    return value if device is None else value.to(device)


def forget(model: nn.Module) -> None:
    """Free the recordings of a model; call it once all weights are real. Deferred tensors left are empty meta ones."""
    for tensor in [*model.parameters(), *model.buffers()]:
        drop_history(tensor)
