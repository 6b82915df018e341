"""Loader: resumable micro-batches of a map-style dataset, by global sample position.

Notable: the state counts samples that were handed out, not those that workers fetched ahead. Nothing draws from the
global random generator, so making an iterator again after a resume changes no dropout mask; inside workers each sample
has its own seed, so random augmentation is the same at any number of workers, and after a resume.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.data import DataLoader

from polyscale.data.checks import DataParallelPlace, length_of, place_of, unknown_option, whole
from polyscale.data.order import Order, stable_hash
from polyscale.data.seeded import Seeded
from polyscale.errors import PolyscaleError

_STATE = ("seed", "epoch", "position", "samples_seen", "length", "shuffle")


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
        raise unknown_option(next(iter(unknown)))
    length = length_of(dataset)
    rank, ranks = place_of(topology)
    order = Order(
        length=length,
        seed=whole("seed", seed, None),
        shuffle=bool(shuffle),
        micro_batch=whole("micro_batch_size", 1 if micro_batch_size is None else micro_batch_size, 1),
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
        epochs=None if epochs is None else whole("epochs", epochs, 1),
        fetching=Fetching(collate_fn, whole("num_workers", num_workers, 0), bool(pin_memory)),
    )


@dataclass(frozen=True)
class Fetching:
    """How samples become batches; see :func:`loader`."""

    collate_fn: Callable[[list[Any]], Any] | None
    num_workers: int
    pin_memory: bool


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
        fetching: Fetching,
    ) -> None:
        self.dataset = dataset
        self.epoch = 0
        self.position = 0
        self.samples_seen = 0
        self._order = order
        self._rank = rank
        self._epochs = epochs
        self._fetching = fetching
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
        epoch, position, seen = (whole(key, state[key], 0) for key in ("epoch", "position", "samples_seen"))
        if position > self._order.length:
            raise PolyscaleError(
                f"A loader state at position {position}", why="it is beyond the end", fix="Load another"
            )
        self._order = replace(self._order, seed=whole("seed", state["seed"], None), shuffle=bool(state["shuffle"]))
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
                Seeded(self.dataset, seed),
                batch_sampler=batches,
                num_workers=self._fetching.num_workers,
                collate_fn=self._fetching.collate_fn,
                pin_memory=self._fetching.pin_memory,
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
