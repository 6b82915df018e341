"""Who holds the memory of this rank's device: by kind, and the largest tensors of each by name.

Notable: storages are counted, each once, under the first kind that names it, so views and tied weights do not count
twice. What no kind names is activations and temporary memory: the difference to what the device's allocator counts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from polyscale._torch import innermost
from polyscale.errors import PolyscaleError
from polyscale.parameters.names import public_name

if TYPE_CHECKING:
    from torch import nn

    from polyscale.engine.setup import Setup

Named = tuple[str, str, torch.Tensor]
"""Kind, name, tensor."""

_NAMED = 3
"""How many tensors of a kind are named."""


@dataclass(frozen=True)
class Holder:
    """All memory of one kind.

    Attributes:
        kind: what it is, in the plural ("parameters", "optimizer states").
        bytes: of all of it.
        largest: (name, bytes) of the largest of it, the largest first.
    """

    kind: str
    bytes: int
    largest: tuple[tuple[str, int], ...] = ()

    def __str__(self) -> str:
        shown = ", ".join(f"{name} {in_words(size)}" for name, size in self.largest)
        return f"{self.kind} {in_words(self.bytes)}" + (f" ({shown})" if shown else "")


@dataclass(frozen=True)
class MemoryReport:
    """What is known about the memory of a device when it has run out. Bytes; None: not known.

    Attributes:
        device: which one ("sim:0"), or "host".
        phase: what the engine was doing.
        requested: what was asked for.
        allocated, peak, total: in use, the most that was in use at once, all that there is.
        holders: who holds what is in use, the largest first; the last one is what has no name.
    """

    device: str
    phase: str
    requested: int | None
    allocated: int | None
    peak: int | None
    total: int | None
    holders: tuple[Holder, ...]


def of_engine(setup: Setup) -> Iterator[Named]:
    """All tensors that an engine keeps, or that its data-parallel plugin uses at this moment."""
    store = setup.applied.store
    for fqn in store.infos:
        yield "parameters", fqn, store.optimizer_parameter(fqn, "element").detach()
    for holding in setup.applied.holdings():
        yield holding.kind, holding.name, holding.tensor
    for fqn in store.infos:
        gradient = store.local(fqn, "gradient")
        if gradient is not None:
            yield "gradients", fqn, gradient
        for name in store.state_names(fqn):
            state = store.local(fqn, name)
            if state is not None:
                yield "optimizer states", f"{name} of {fqn}", state
    for kind, name, tensor in of_model(setup.model):
        yield ("parameters in the dtype of compute" if kind == "parameters" else kind), name, tensor


def of_model(model: nn.Module) -> Iterator[Named]:
    """Parameters, their gradients and buffers of a module."""
    for name, parameter in model.named_parameters():
        with contextlib.suppress(PolyscaleError):  # one that was freed, which holds nothing
            yield "parameters", public_name(name), parameter.detach()
        if parameter.grad is not None:
            yield "gradients", public_name(name), parameter.grad
    for name, buffer in model.named_buffers():
        yield "buffers", public_name(name), buffer


def count(tensors: Iterable[Named], device: torch.device) -> list[Holder]:
    """Add up, by kind, the storages of ``tensors`` that are on ``device``; the largest kind first."""
    names: dict[int, list[str]] = {}
    kind_of: dict[int, str] = {}
    kinds: dict[str, list[tuple[int, int]]] = {}
    for kind, name, inner in ((kind, name, inner) for kind, name, tensor in tensors for inner in innermost(tensor)):
        storage = inner.untyped_storage()
        if storage.device != device or not storage.nbytes():
            continue
        place = storage.data_ptr()
        if place not in names:
            names[place], kind_of[place] = [], kind
            kinds.setdefault(kind, []).append((place, storage.nbytes()))
        if kind == kind_of[place] and name not in names[place]:
            names[place].append(name)
    found = [
        Holder(
            kind,
            sum(size for _, size in sizes),
            tuple((_joined(names[place]), size) for place, size in sorted(sizes, key=lambda pair: -pair[1])[:_NAMED]),
        )
        for kind, sizes in kinds.items()
    ]
    return sorted(found, key=lambda holder: -holder.bytes)


def _joined(names: list[str]) -> str:
    """The name of a storage that several tensors share."""
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def in_words(size: int) -> str:
    """A number of bytes for readers: "20.0 MiB"."""
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if abs(size) >= 2**power:
            return f"{size / 2**power:.1f} {unit}"
    return f"{size} bytes"
