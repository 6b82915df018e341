"""A collective under way, and how its failure is told: a backend that lacks it apart from a rank that is gone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from polyscale.errors import RankError, UnsupportedError

if TYPE_CHECKING:
    import torch


class C10dWork:
    """A collective under way. It holds its tensors until it has been waited for."""

    def __init__(self, handle: Any, what: str, tensors: Sequence[torch.Tensor]) -> None:
        """``handle``: c10d's own work; ``what``: how errors name the collective."""
        self._handle = handle
        self._what = what
        self._tensors = tuple(tensors)
        self._device = tensors[0].device if tensors else None

    def wait(self) -> None:
        """Order the current stream behind it; block for host tensors.

        Raises:
            RankError: another rank is gone, or did not come in time.
        """
        if self._handle is not None:
            try:
                self._handle.wait()
            except RuntimeError as error:
                raise _failed(self._what, error) from error
        self._handle, self._tensors = None, ()

    def wait_host(self) -> None:
        """Block the host until it is done.

        Raises:
            RankError: as ``wait``.
        """
        self.wait()
        if self._device is None or self._device.type == "cpu":
            return
        import torch

        event = torch.Event(device=self._device)
        event.record()
        event.synchronize()


def start(what: str, launch: Callable[[], Any], tensors: Sequence[torch.Tensor]) -> C10dWork:
    """Start a collective; a backend that lacks it says so by an exception that is told apart from a failed rank."""
    try:
        handle = launch()
    except (RuntimeError, NotImplementedError, TypeError) as error:
        if "support" in str(error) or "Invalid scalar type" in str(error):
            raise UnsupportedError(what, why=_line(error)) from error
        raise _failed(what, error) from error
    return C10dWork(handle, what, tensors)


def _failed(what: str, error: Exception) -> RankError:
    import torch.distributed as dist

    who = f"rank {dist.get_rank()}" if dist.is_initialized() else "this process"
    return RankError(f"{what} on {who}", why=_line(error), fix="Look for the rank that failed first")


def _line(error: Exception) -> str:
    """The first line of a backend's message, without the C++ stack."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
