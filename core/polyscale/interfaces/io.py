"""I/O: moves bytes between tensors and files.

Notable: a tensor under an asynchronous operation is held until ``wait``; a second overlapping operation on the same
memory is refused; a short read or a full disk is an error that names path, expected and actual size.
"""

from __future__ import annotations

from os import PathLike
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch

Path = str | PathLike[str]


class IOWork(Protocol):
    """A read or write under way; it holds its tensor."""

    def wait(self) -> int:
        """Block until done; returns the bytes moved.

        Raises:
            PolyscaleError: short read, full disk, missing file.
        """


@runtime_checkable
class FileIO(Protocol):
    """Positional reads and writes of contiguous host tensors.

    Attributes:
        name: the plugin's name ("threads").
    """

    name: str

    def is_available(self) -> bool:
        """Return whether it works on this system; never raises."""

    def why_unavailable(self) -> str:
        """Say what is missing; "" when available."""

    def read(self, tensor: torch.Tensor, path: Path, offset: int = 0) -> int:
        """Fill ``tensor`` from ``path`` at byte ``offset``; blocks; returns bytes read."""

    def write(self, tensor: torch.Tensor, path: Path, offset: int = 0) -> int:
        """Write ``tensor`` to ``path`` at byte ``offset`` (the file is made if absent, never cut); blocks."""

    def read_async(self, tensor: torch.Tensor, path: Path, offset: int = 0) -> IOWork:
        """As ``read``, at once; the tensor must not be touched until ``wait``."""

    def write_async(self, tensor: torch.Tensor, path: Path, offset: int = 0) -> IOWork:
        """As ``write``, at once; the tensor must not be changed until ``wait``."""

    def wait(self) -> int:
        """Wait for everything under way; returns how many operations ended. The first error is raised."""

    def close(self) -> None:
        """Wait, then free threads and buffers."""
