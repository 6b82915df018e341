"""Checkpoint: a storage of logical tensors by name, independent of world size and stage.

Notable: a tensor is described by boxes (offsets and sizes in the logical tensor) and by the local memory that holds
them, so one storage serves replicated tensors, DTensors and flat shards alike, and a load may cut the boxes otherwise
than the save did. What is not a tensor is kept beside it by the engine as JSON or a weights-only file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from os import PathLike
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class Box:
    """A block of a logical tensor and the memory that holds it here.

    Attributes:
        offsets: first index of the block in each dimension of the logical tensor.
        data: local tensor of exactly the block's shape (a view: a load writes into it).
        owner: whether this rank writes the block (one rank of its replicas does).
    """

    offsets: tuple[int, ...]
    data: torch.Tensor
    owner: bool = True


@dataclass(frozen=True)
class LogicalTensor:
    """A whole tensor as this rank sees it: its full shape, and the boxes it holds (possibly none)."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    boxes: tuple[Box, ...] = field(default_factory=tuple)


@dataclass(frozen=True)
class StoredTensor:
    """What a directory says of one tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@runtime_checkable
class CheckpointStorage(Protocol):
    """Writes and reads logical tensors. All calls but ``contents`` are collective over ``group``."""

    name: str

    def write(
        self, directory: str | PathLike[str], tensors: Mapping[str, LogicalTensor], group: ProcessGroup | None
    ) -> None:
        """Write all tensors into an existing, empty ``directory`` and fsync.

        Raises:
            CheckpointError: on every rank when one failed (no space left, ...).
        """

    def contents(self, directory: str | PathLike[str]) -> dict[str, StoredTensor]:
        """Names, shapes and dtypes in ``directory``. Local; executes nothing from the files."""

    def read(
        self, directory: str | PathLike[str], tensors: Mapping[str, LogicalTensor], group: ProcessGroup | None
    ) -> None:
        """Fill the boxes of all ``tensors`` (names must be in ``contents``, shapes equal; dtype is converted)."""
