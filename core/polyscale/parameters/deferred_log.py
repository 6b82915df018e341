"""The log behind ``partitioned_init``: what happened to each storage.

Notable: a storage's history is a chain of versions. An operator that wrote it adds one; an operator that overwrote all
of it starts a new chain, so what came before is dropped unless somebody read it. A tensor is found again by its
storage: the log hangs on the storage object itself, lives exactly as long, and views, ``Parameter`` and ``.data`` keep
it without any bookkeeping.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from polyscale.errors import PolyscaleError

_ATTRIBUTE = "_polyscale_history"


@dataclass(eq=False, slots=True)
class History:
    """What happened to one storage.

    Attributes:
        nbytes: its size in bytes.
        dtype: dtype of the tensor it was made for.
        clock: number of the last operator that touched it.
        head: its newest version; None while it is uninitialised memory.
    """

    nbytes: int
    dtype: torch.dtype
    clock: int = 0
    head: Version | None = None


@dataclass(eq=False, slots=True)
class Version:
    """The content of a storage after ``operation``; ``previous`` is None where nothing of it is left."""

    operation: Operation
    previous: Version | None


@dataclass(eq=False, slots=True)
class TensorRef:
    """A tensor as memory of a storage: where it lies, and which version it shows (None in an operator's arguments)."""

    history: History
    version: Version | None
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype


@dataclass(eq=False, slots=True)
class Geometry:
    """A tensor of which an operator used shape, strides and dtype only (``zeros_like``)."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


@dataclass(eq=False, slots=True)
class Operation:
    """One operator call.

    Attributes:
        number: position in time; operators that touch a common storage never share one.
        func: the ATen overload.
        args: positional arguments, tensors as :class:`TensorRef`, :class:`Geometry` or a snapshot.
        kwargs: keyword arguments, likewise.
        outputs: where each returned tensor lies; None for memory of an argument.
        random: generator state before it (bytes), or a seed; None for an operator without random numbers.
        default_dtype: torch's default dtype at the time.
        reads: what it depends on, beside the content of what it writes into.
    """

    number: int
    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[TensorRef | None, ...]
    random: torch.Tensor | int | None
    default_dtype: torch.dtype
    reads: tuple[Version, ...] = field(default=())

    def histories(self) -> Iterator[History]:
        """Every storage it touches, possibly more than once."""
        for leaf in leaves((self.args, self.kwargs, self.outputs)):
            if isinstance(leaf, TensorRef):
                yield leaf.history


def map_leaves(value: Any, function: Callable[[Any], Any]) -> Any:
    """Apply ``function`` to every leaf of nested lists, tuples and dicts, as operators' arguments are nested."""
    if isinstance(value, (list, tuple)):
        return type(value)(map_leaves(item, function) for item in value)
    if isinstance(value, dict):
        return {key: map_leaves(item, function) for key, item in value.items()}
    return function(value)


def leaves(value: Any) -> Iterator[Any]:
    """Yield every leaf of nested lists, tuples and dicts."""
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from leaves(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from leaves(item)
    else:
        yield value


def history_of(tensor: Any) -> History | None:
    """The history of the storage behind ``tensor``, or None."""
    if not isinstance(tensor, torch.Tensor):
        return None
    try:
        return getattr(tensor.untyped_storage(), _ATTRIBUTE, None)
    except (NotImplementedError, RuntimeError, PolyscaleError):  # sparse tensors, wrappers and freed shards have none
        return None


def start_history(tensor: torch.Tensor, clock: int) -> History:
    """Begin the history of a fresh meta tensor's storage."""
    storage = tensor.untyped_storage()
    history = History(nbytes=storage.nbytes(), dtype=tensor.dtype, clock=clock)
    setattr(storage, _ATTRIBUTE, history)
    return history


def drop_history(tensor: torch.Tensor) -> None:
    """Free the history of the storage behind ``tensor``."""
    history = history_of(tensor)
    if history is not None:
        history.head = None
        delattr(tensor.untyped_storage(), _ATTRIBUTE)


def reference(tensor: torch.Tensor, history: History) -> TensorRef:
    """Describe a deferred tensor as it is now."""
    history.nbytes = max(history.nbytes, tensor.untyped_storage().nbytes())
    return TensorRef(
        history, history.head, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()), tensor.dtype
    )
