"""The log behind ``partitioned_init``: what happened to each storage, and how to do it again for one of them.

Notable: a storage's history is a chain of versions. An operator that wrote it adds one; an operator that overwrote all
of it starts a new chain, so what came before is dropped unless somebody read it. A tensor is found again by its
storage: the log hangs on the storage object itself, lives exactly as long, and views, ``Parameter`` and ``.data`` keep
it without any bookkeeping. Replaying takes the operators that a version depends on and runs them in their first order,
which is exact and linear, however they depend on one another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from polyscale import _torch

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
    except (NotImplementedError, RuntimeError):  # sparse tensors and wrappers have no storage
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


def real_value(leaf: Any) -> Any:
    """The real tensor for a deferred one; anything else as it is."""
    history = history_of(leaf)
    return leaf if history is None else replay_reference(reference(leaf, history))


def replay_reference(ref: TensorRef, *, poison: bool = False) -> torch.Tensor:
    """Compute a tensor of the log on the CPU; the global random state stays as it is.

    Args:
        ref: what to compute.
        poison: fill memory that no operator has written with NaN, so that it can be found.
    """
    with _torch.without_modes(), torch.no_grad(), torch.autocast("cpu", enabled=False):
        operations = _needed(ref.version)
        last_use = {history: i for i, operation in enumerate(operations) for history in operation.histories()}
        memory = _Memory(poison)
        for i, operation in enumerate(operations):
            _run(operation, memory)
            for history in set(operation.histories()):
                if last_use[history] == i and history is not ref.history:
                    memory.free(history)
        result = memory.view(ref)
        whole = result.numel() * result.element_size() == result.untyped_storage().nbytes()
        return result if whole else result.clone()


def _needed(version: Version | None) -> list[Operation]:
    """The operators that a version depends on, in their first order."""
    found: dict[int, Operation] = {}
    seen: set[int] = set()
    waiting = [version]
    while waiting:
        current = waiting.pop()
        while current is not None and id(current) not in seen:
            seen.add(id(current))
            if id(current.operation) not in found:
                found[id(current.operation)] = current.operation
                waiting.extend(current.operation.reads)
            current = current.previous
    return sorted(found.values(), key=lambda operation: operation.number)


class _Memory:
    """Real storages of one replay."""

    def __init__(self, poison: bool) -> None:
        self._poison = poison
        self._storages: dict[History, torch.UntypedStorage] = {}

    def view(self, ref: TensorRef) -> torch.Tensor:
        storage = self._storages.get(ref.history)
        if storage is None:
            storage = self._storages[ref.history] = self._fresh(ref.history)
        return torch.empty(0, dtype=ref.dtype, device="cpu").set_(storage, ref.offset, ref.size, ref.stride)

    def keep(self, ref: TensorRef, produced: torch.Tensor, taken: set[int]) -> None:
        """Take an operator's output, where it has the layout that the log knows; else copy it there."""
        storage = produced.untyped_storage()
        same_layout = produced.stride() == ref.stride and produced.storage_offset() == ref.offset
        if same_layout and storage.nbytes() == ref.history.nbytes and storage.data_ptr() not in taken:
            self._storages[ref.history] = storage
        else:
            self.view(ref).copy_(produced)

    def free(self, history: History) -> None:
        self._storages.pop(history, None)

    def _fresh(self, history: History) -> torch.UntypedStorage:
        storage: torch.UntypedStorage = torch.empty(history.nbytes, dtype=torch.uint8, device="cpu").untyped_storage()
        if self._poison and history.dtype.is_floating_point:
            count = history.nbytes // history.dtype.itemsize
            torch.empty(0, dtype=history.dtype, device="cpu").set_(storage, 0, (count,), (1,)).fill_(float("nan"))
        return storage


def _run(operation: Operation, memory: _Memory) -> None:
    def real(leaf: Any) -> Any:
        if isinstance(leaf, TensorRef):
            return memory.view(leaf)
        if isinstance(leaf, Geometry):
            return torch.empty_strided(leaf.size, leaf.stride, dtype=leaf.dtype, device="cpu")
        return leaf

    args, kwargs = map_leaves(operation.args, real), map_leaves(operation.kwargs, real)
    taken = {leaf.untyped_storage().data_ptr() for leaf in leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
    with _random_state(operation.random), _default_dtype(operation.default_dtype):
        result = operation.func(*args, **kwargs)
    produced = [leaf for leaf in leaves(result) if isinstance(leaf, torch.Tensor)]
    for ref, tensor in zip(operation.outputs, produced, strict=False):
        if ref is not None:
            memory.keep(ref, tensor, taken)


@contextmanager
def _random_state(random: torch.Tensor | int | None) -> Iterator[None]:
    if random is None:
        yield
        return
    generator = torch.default_generator
    saved = generator.get_state()
    try:
        if isinstance(random, int):
            generator.manual_seed(random)
        else:
            generator.set_state(random)
        yield
    finally:
        generator.set_state(saved)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    saved = torch.get_default_dtype()
    if saved == dtype:
        yield
        return
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(saved)
