"""Computing a tensor from its log.

Notable: the operators that a version depends on are run in their first order, which is exact and linear, however they
depend on one another; a storage is freed after its last use.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from polyscale import _torch
from polyscale.parameters.deferred_log import (
    Geometry,
    History,
    Operation,
    TensorRef,
    Version,
    history_of,
    leaves,
    map_leaves,
    reference,
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
