"""Communication: collectives between ranks over one backend.

Notable: every call returns a :class:`Work` that holds its tensors; groups come from the topology and are c10d process
groups, so whatever torch builds on groups (FSDP2, DTensor, pipelining) uses the same backend. How a backend
accumulates sums is part of its contract, because a bf16 sum accumulated in bf16 is another number.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup


class Work(Protocol):
    """A collective under way."""

    def wait(self) -> None:
        """Order the current stream behind it (on cpu: block)."""

    def wait_host(self) -> None:
        """Block the host until it is done."""


@runtime_checkable
class Communication(Protocol):
    """Collectives of one backend. Tensors are contiguous and on the accelerator's device.

    Attributes:
        name: the plugin's name ("gloo").
        sums: dtype name -> dtype name in which the backend accumulates sums of that dtype; a dtype that is missing
            cannot be summed.
    """

    name: str
    sums: Mapping[str, str]

    def is_available(self) -> bool:
        """Return whether this torch can use it; never raises."""

    def why_unavailable(self) -> str:
        """Say what is missing; "" when available."""

    def backend(self, device_type: str) -> str:
        """The string for ``init_process_group`` (host tensors always have a backend too)."""

    def allocate(self, numel: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A 1-D buffer that this backend moves fastest, for callers that keep communication buffers of their own."""

    def all_gather(self, output: torch.Tensor, input: torch.Tensor, group: ProcessGroup | None = None) -> Work:
        """``output`` (world x n) receives every rank's ``input`` (n), in rank order."""

    def reduce_scatter(self, output: torch.Tensor, input: torch.Tensor, group: ProcessGroup | None = None) -> Work:
        """``output`` (n) receives this rank's part of the sum of every rank's ``input`` (world x n)."""

    def all_reduce(self, tensor: torch.Tensor, group: ProcessGroup | None = None, *, op: str = "sum") -> Work:
        """``tensor`` becomes the ``op`` ("sum", "max", "min") over ranks."""

    def all_to_all(self, output: torch.Tensor, input: torch.Tensor, group: ProcessGroup | None = None) -> Work:
        """Equal parts of ``input`` go to each rank; ``output`` receives one from each."""

    def broadcast(self, tensor: torch.Tensor, source: int, group: ProcessGroup | None = None) -> Work:
        """``tensor`` becomes that of global rank ``source``."""

    def send(self, tensor: torch.Tensor, to: int, group: ProcessGroup | None = None) -> Work:
        """Send to global rank ``to``."""

    def recv(self, tensor: torch.Tensor, source: int, group: ProcessGroup | None = None) -> Work:
        """Receive from global rank ``source``."""

    def barrier(self, group: ProcessGroup | None = None) -> Work:
        """Complete when every rank of the group has called it."""
