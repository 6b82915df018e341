"""The bytes behind a tensor, and which tensors have such bytes."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING

from polyscale.errors import PolyscaleError, UnsupportedError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Region:
    """Host memory of one tensor, which it keeps alive: ``start`` address and ``size`` in bytes."""

    tensor: torch.Tensor
    start: int
    size: int

    def view(self) -> memoryview:
        """A writable view of the bytes; valid as long as this object is."""
        return memoryview((ctypes.c_char * self.size).from_address(self.start)).cast("B")

    def overlaps(self, other: Region) -> bool:
        """Whether a byte belongs to both."""
        return (
            min(self.size, other.size) > 0
            and self.start < other.start + other.size
            and other.start < self.start + self.size
        )


def region(tensor: torch.Tensor) -> Region:
    """Return the memory of ``tensor``, of any dtype and shape.

    Raises:
        UnsupportedError: it is not in host memory, not contiguous, or its values are not its bytes.
        PolyscaleError: it is no tensor.
    """
    import torch

    if not isinstance(tensor, torch.Tensor):
        raise PolyscaleError(
            f"A {type(tensor).__name__} to read or write", why="Only tensors have memory to move", fix="Give a tensor"
        )
    given = f"A tensor of shape {tuple(tensor.shape)}, {tensor.dtype}, on {tensor.device}"
    if hasattr(tensor, "to_local"):
        raise UnsupportedError(given, why="It is a DTensor, spread over ranks", fix="Give its to_local()")
    if tensor.layout is not torch.strided:
        raise UnsupportedError(
            f"{given}, {tensor.layout}", why="It has no single piece of memory", fix="Give its parts"
        )
    if tensor.device.type != "cpu":
        raise UnsupportedError(
            given,
            why="Threads move host memory only",
            fix="Copy it to the host first: tensor.cpu(), or a pinned buffer",
        )
    if not tensor.is_contiguous():
        raise UnsupportedError(
            f"{given}, strides {tensor.stride()}",
            why="It is not contiguous, so its bytes are not its values in order",
            fix="Write tensor.contiguous(); read into a contiguous tensor and copy from it",
        )
    if tensor.is_conj() or tensor.is_neg():
        raise UnsupportedError(
            given, why="It is a lazily conjugated or negated view", fix="Give tensor.resolve_conj().resolve_neg()"
        )
    return Region(tensor, tensor.data_ptr(), tensor.numel() * tensor.element_size())
