"""What a loader is given, checked before anything is read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from torch.utils.data import IterableDataset

from polyscale.errors import PolyscaleError, nearest

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


def length_of(dataset: Any) -> int:
    """Number of samples, at least 1.

    Raises:
        PolyscaleError: ``dataset`` cannot be indexed by sample number, or is empty.
    """
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


def place_of(topology: DataParallelPlace | None) -> tuple[int, int]:
    """``dp_rank`` and ``dp_size``; those of a world of 1 for None.

    Raises:
        PolyscaleError: ``topology`` does not have them.
    """
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


def whole(name: str, value: Any, least: int | None) -> int:
    """Return ``value`` where it is a whole number, of at least ``least``.

    Raises:
        PolyscaleError: it is not.
    """
    if isinstance(value, bool) or not isinstance(value, int) or (least is not None and value < least):
        valid = "a whole number" if least is None else f"a whole number from {least}"
        raise PolyscaleError(f"{name} = {value!r}", why=f"it is not {valid}", fix=f"Give {valid}")
    return value


def unknown_option(name: str) -> PolyscaleError:
    """The error for an option that :func:`~polyscale.data.sampled.loader` does not have."""
    other: dict[str, str] = {"batch_size": "micro_batch_size", "workers": "num_workers"}
    close = other.get(name) or nearest(name, _OPTIONS)
    why = "there is no such option" + (f"; the nearest is {close!r}" if close else "")
    if name in ("sampler", "batch_sampler"):
        why = "the order of samples is the loader's own, so that it can be resumed"
    return PolyscaleError(f"loader({name}=...)", why=why, fix=f"Valid: {', '.join(_OPTIONS)}")
