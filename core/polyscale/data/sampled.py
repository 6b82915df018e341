"""Loader: resumable micro-batches of a map-style dataset, by global sample position.

Notable: the state counts samples that were handed out, not those that workers fetched ahead. Nothing draws from the
global random generator, so making an iterator again after a resume changes no dropout mask; inside workers each sample
has its own seed, so random augmentation is the same at any number of workers, and after a resume.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Protocol

import numpy
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from polyscale.data.order import Order, stable_hash
from polyscale.errors import PolyscaleError, nearest

_STATE = ("seed", "epoch", "position", "samples_seen", "length", "shuffle")
_OPTIONS = (
    "topology", "micro_batch_size", "seed", "shuffle", "collate_fn", "num_workers", "drop_last", "epochs", "pin_memory",
)  # fmt: skip


class DataParallelPlace(Protocol):
    """What the loader asks of a topology: this rank's place among those that see different samples."""

    @property
    def dp_rank(self) -> int:
        """This rank's number."""

    @property
    def dp_size(self) -> int:
        """How many there are."""


def loader(
    dataset: Any,
    *,
    topology: DataParallelPlace | None = None,
    micro_batch_size: int | None = None,
    seed: int = 0,
    shuffle: bool = True,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    num_workers: int = 0,
    drop_last: bool = True,
    epochs: int | None = None,
    pin_memory: bool = False,
    **unknown: Any,
) -> Loader:
    """Make a loader that yields this rank's micro-batches, and can be resumed at any number of ranks.

    All ranks get the same number of batches. An iteration goes from the current position to the end of the epoch, and
    the next iteration through the next epoch, in another order; after a ``break`` it goes on where it stopped.

    Args:
        dataset: anything with ``len()`` and ``[index]``, equal on all ranks.
        topology: has ``dp_rank`` and ``dp_size``; None: a world of 1.
        micro_batch_size: samples of one rank in one batch; None: 1.
        seed: of the order of samples; a loaded state brings its own.
        shuffle: False keeps the dataset's order.
        collate_fn: list of samples -> batch; None: torch's default.
        num_workers: processes that fetch ahead; 0 fetches in this one.
        drop_last: True leaves out, at the end of each epoch, what does not fill a batch on every rank. False fills the
            last round up with samples from the beginning of the same epoch's order, which are then seen twice.
        epochs: None: each iteration is one epoch, and there is always another. A number: one iteration goes through
            all of so many epochs, and afterwards there are no more batches.
        pin_memory: put batches into pinned host memory; needs an accelerator.
        unknown: refused.

    Raises:
        PolyscaleError: a dataset that cannot be indexed or is too small, or an option that is unknown or out of range.
    """
    if unknown:
        raise _unknown(next(iter(unknown)))
    length = _length(dataset)
    rank, ranks = _place(topology)
    order = Order(
        length=length,
        seed=_whole("seed", seed, None),
        shuffle=bool(shuffle),
        micro_batch=_whole("micro_batch_size", 1 if micro_batch_size is None else micro_batch_size, 1),
        ranks=ranks,
        drop_last=bool(drop_last),
    )
    if order.rounds() == 0:
        raise PolyscaleError(
            f"A dataset of {length} samples with micro_batch_size {order.micro_batch} on {ranks} data-parallel ranks",
            why=f"one round takes {order.round_size} samples, so with drop_last=True there would be no batch at all",
            fix="Use a smaller micro_batch_size, or drop_last=False to see some samples twice",
        )
    return Loader(
        dataset,
        order,
        rank=rank,
        epochs=None if epochs is None else _whole("epochs", epochs, 1),
        collate_fn=collate_fn,
        num_workers=_whole("num_workers", num_workers, 0),
        pin_memory=bool(pin_memory),
    )


class Loader:
    """Micro-batches of one rank; made by :func:`loader`.

    Attributes:
        dataset: what is loaded.
        epoch: epoch of the next batch, from 0.
        position: samples of this epoch that all ranks together have been given.
        samples_seen: the same over all epochs.
    """

    def __init__(
        self,
        dataset: Any,
        order: Order,
        *,
        rank: int = 0,
        epochs: int | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
        pin_memory: bool = False,
    ) -> None:
        self.dataset = dataset
        self.epoch = 0
        self.position = 0
        self.samples_seen = 0
        self._order = order
        self._rank = rank
        self._epochs = epochs
        self._collate_fn = collate_fn
        self._num_workers = num_workers
        self._pin_memory = pin_memory
        self._stream = object()

    @property
    def micro_batch_size(self) -> int:
        """Samples of one rank in one batch."""
        return self._order.micro_batch

    def __len__(self) -> int:
        """Batches that an iteration from the very beginning gives."""
        return self._order.rounds() * (self._epochs or 1)

    def __iter__(self) -> Iterator[Any]:
        """Go on from the current position; iterators of one loader share it, so that no batch comes twice."""
        return self._iterate()

    def state_dict(self) -> dict[str, Any]:
        """Where the next batch starts: equal on all ranks that were given equally many batches."""
        return {
            "seed": self._order.seed,
            "epoch": self.epoch,
            "position": self.position,
            "samples_seen": self.samples_seen,
            "length": self._order.length,
            "shuffle": self._order.shuffle,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where ``state`` was taken, with this loader's ranks and micro-batch size; iterators in use follow.

        Raises:
            PolyscaleError: it is no loader's state, or that of another dataset.
        """
        missing = [key for key in _STATE if key not in state]
        if missing:
            raise PolyscaleError(
                f"A loader state with keys {sorted(state)}",
                why=f"{', '.join(missing)} missing",
                fix="Load what Loader.state_dict() gave",
            )
        if state["length"] != self._order.length:
            raise PolyscaleError(
                f"A loader state over {state['length']} samples for a dataset of {self._order.length}",
                why="the order of samples depends on their number",
                fix="Resume with the same dataset, or leave the loader's state out and start at its beginning",
            )
        epoch, position, seen = (_whole(key, state[key], 0) for key in ("epoch", "position", "samples_seen"))
        if position > self._order.length:
            raise PolyscaleError(
                f"A loader state at position {position}", why="it is beyond the end", fix="Load another"
            )
        self._order = replace(self._order, seed=_whole("seed", state["seed"], None), shuffle=bool(state["shuffle"]))
        self.epoch, self.position, self.samples_seen = epoch, position, seen
        self._stream = object()
        self._turn_over()

    def _iterate(self) -> Iterator[Any]:
        while self._epochs is None or self.epoch < self._epochs:
            stream = self._stream = object()
            for batch in self._fetch():
                self._deliver()
                yield batch
                if self._stream is not stream:
                    break  # a state was loaded, or another iterator went on: what was fetched ahead is not next
            else:
                if self._epochs is None:
                    return

    def _fetch(self) -> Iterator[Any]:
        batches = self._order.batches(epoch=self.epoch, position=self.position, rank=self._rank)
        seed = stable_hash(self._order.seed, "sample", self.epoch)
        return iter(
            DataLoader(
                _Seeded(self.dataset, seed),
                batch_sampler=batches,
                num_workers=self._num_workers,
                collate_fn=self._collate_fn,
                pin_memory=self._pin_memory,
                generator=torch.Generator(),
            )
        )

    def _deliver(self) -> None:
        after = self._order.advance(self.position)
        self.samples_seen += after - self.position
        self.position = after
        self._turn_over()

    def _turn_over(self) -> None:
        """Begin the next epoch as soon as this one has no batch left, so that no iteration is empty."""
        if self._order.rounds(self.position) == 0:
            self.epoch += 1
            self.position = 0


class _Seeded(Dataset[Any]):
    """A dataset whose samples, in a worker, are each fetched under their own seed."""

    def __init__(self, dataset: Any, seed: int) -> None:
        self._dataset = dataset
        self._seed = seed

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        self._seed_worker(index)
        return self._dataset[index]

    def __getitems__(self, indices: list[int]) -> list[Any]:
        many = getattr(self._dataset, "__getitems__", None)
        if many is None:
            return [self[index] for index in indices]
        self._seed_worker(indices[0])
        return list(many(indices))

    def _seed_worker(self, index: int) -> None:
        if get_worker_info() is not None:
            seed = stable_hash(self._seed, index)
            torch.default_generator.manual_seed(seed)
            random.seed(seed)
            numpy.random.seed(seed % 2**32)


def _length(dataset: Any) -> int:
    kind = type(dataset).__name__
    if isinstance(dataset, (str, bytes, Mapping)):
        raise PolyscaleError(
            f"A dataset of type {kind}",
            why="it is not indexed by sample number",
            fix="Give a list of samples, or a torch.utils.data.Dataset (TensorDataset for columns of tensors)",
        )
    if isinstance(dataset, IterableDataset) or not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise PolyscaleError(
            f"A dataset of type {kind}",
            why="it has no len() and [index], so its position cannot be restored at another number of ranks",
            fix="Iterate it yourself, and give what has state_dict() and load_state_dict() to engine.track(name, it)",
        )
    length = len(dataset)
    if length == 0:
        raise PolyscaleError(f"A dataset of type {kind}", why="it is empty", fix="Give at least one sample")
    return length


def _place(topology: DataParallelPlace | None) -> tuple[int, int]:
    if topology is None:
        return 0, 1
    rank, ranks = getattr(topology, "dp_rank", None), getattr(topology, "dp_size", None)
    if not isinstance(rank, int) or not isinstance(ranks, int) or not 0 <= rank < ranks:
        raise PolyscaleError(
            f"topology = {topology!r}",
            why="it has no dp_rank below dp_size",
            fix="Pass engine.topology, or leave it out for a world of 1",
        )
    return rank, ranks


def _whole(name: str, value: Any, least: int | None) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or (least is not None and value < least):
        valid = "a whole number" if least is None else f"a whole number from {least}"
        raise PolyscaleError(f"{name} = {value!r}", why=f"it is not {valid}", fix=f"Give {valid}")
    return value


def _unknown(name: str) -> PolyscaleError:
    other: dict[str, str] = {"batch_size": "micro_batch_size", "workers": "num_workers"}
    close = other.get(name) or nearest(name, _OPTIONS)
    why = "there is no such option" + (f"; the nearest is {close!r}" if close else "")
    if name in ("sampler", "batch_sampler"):
        why = "the order of samples is the loader's own, so that it can be resumed"
    return PolyscaleError(f"loader({name}=...)", why=why, fix=f"Valid: {', '.join(_OPTIONS)}")
