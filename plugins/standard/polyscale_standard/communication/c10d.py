"""Collectives of one c10d backend.

Notable: a collective's sizes, dtype and membership are checked on this rank before it starts, because backends answer
a mismatch with a signal or a wait for ever; 8-bit floats are moved as bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from polyscale import _torch
from polyscale.errors import PolyscaleError, UnsupportedError, nearest
from polyscale_standard.communication.checks import check_contiguous, check_peer, check_sizes, world_of
from polyscale_standard.communication.work import C10dWork, start

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

_SHORT = {"float64": "fp64", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
_OPS = ("sum", "max", "min")


@dataclass(frozen=True)
class Backend:
    """What differs between backends: the name, the sums, and whether it moves host tensors."""

    name: str
    sums: Mapping[str, str]
    host: bool = False


class C10dCommunication:
    """Collectives of one c10d backend. ``group=None`` is the default group."""

    def __init__(self, backend: Backend) -> None:
        """``backend``: name, sums, host tensors."""
        self.name = backend.name
        self.sums: Mapping[str, str] = backend.sums
        self._host = backend.host

    def is_available(self) -> bool:
        """Return whether this torch has the backend."""
        return self.why_unavailable() == ""

    def why_unavailable(self) -> str:
        """Say that this torch lacks the backend; "" when it has it."""
        import torch
        import torch.distributed as dist

        if not dist.is_available():
            return f"this torch ({torch.__version__}) is built without torch.distributed"
        if not dist.is_backend_available(self.name):
            return f"this torch ({torch.__version__}) has no backend {self.name}; it comes with the device's torch"
        return ""

    def backend(self, device_type: str) -> str:
        """The string for ``init_process_group``: this backend for the device, and one for host tensors.

        Raises:
            UnsupportedError: the backend does not move tensors of ``device_type``.
        """
        import torch.distributed as dist

        known = [entry.lower() for entry in dist.Backend.backend_capability.get(self.name, [])]
        if known and device_type not in known:
            raise UnsupportedError(
                f"Communication {self.name!r} for device type {device_type!r}",
                why=f"It moves tensors of {', '.join(known)}",
                fix="Name one that moves these, in backends.communication or in the accelerator's communications",
            )
        if device_type == "cpu":
            return self.name
        return f"cpu:{self.name if self._host else 'gloo'},{device_type}:{self.name}"

    def allocate(self, numel: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """An uninitialised 1-D tensor; c10d's backends have no memory of their own."""
        import torch

        return torch.empty(numel, dtype=dtype, device=device)

    def all_gather(self, output: torch.Tensor, input: torch.Tensor, group: ProcessGroup | None = None) -> C10dWork:
        """``output`` (world x n) receives every rank's ``input`` (n), in rank order."""
        world = world_of("all_gather", group)
        check_sizes("all_gather", whole=output, part=input, world=world)
        out, inp = _bytes(output), _bytes(input)
        return start("all_gather", lambda: _torch.all_gather(out, inp, group, async_op=True), (output, input))

    def reduce_scatter(self, output: torch.Tensor, input: torch.Tensor, group: ProcessGroup | None = None) -> C10dWork:
        """``output`` (n) receives this rank's part of the sum of every rank's ``input`` (world x n).

        Raises:
            UnsupportedError: the backend cannot sum this dtype.
        """
        world = world_of("reduce_scatter", group)
        check_sizes("reduce_scatter", whole=input, part=output, world=world)
        self._check_reduction(input.dtype, "sum")
        launch = lambda: _torch.reduce_scatter(output, input, group, async_op=True)  # noqa: E731
        return start("reduce_scatter", launch, (output, input))

    def all_reduce(self, tensor: torch.Tensor, group: ProcessGroup | None = None, *, op: str = "sum") -> C10dWork:
        """``tensor`` becomes the ``op`` ("sum", "max", "min") over ranks.

        Raises:
            UnsupportedError: the backend cannot reduce this dtype.
        """
        import torch.distributed as dist

        world_of("all_reduce", group)
        check_contiguous("all_reduce", tensor)
        self._check_reduction(tensor.dtype, op)
        kind = getattr(dist.ReduceOp, op.upper())
        return start("all_reduce", lambda: dist.all_reduce(tensor, kind, group=group, async_op=True), (tensor,))

    def all_to_all(self, output: torch.Tensor, input: torch.Tensor, group: ProcessGroup | None = None) -> C10dWork:
        """Equal parts of ``input`` go to each rank; ``output`` receives one from each."""
        import torch.distributed as dist

        world = world_of("all_to_all", group)
        check_sizes("all_to_all", whole=output, part=input, world=1)
        if input.numel() % world:
            raise PolyscaleError(
                f"all_to_all of {input.numel()} elements over {world} ranks",
                why="Each rank is sent an equal part",
                fix=f"Give a multiple of {world}",
            )
        out, inp = _bytes(output).view(-1), _bytes(input).view(-1)
        launch = lambda: dist.all_to_all_single(out, inp, group=group, async_op=True)  # noqa: E731
        return start("all_to_all", launch, (output, input))

    def broadcast(self, tensor: torch.Tensor, source: int, group: ProcessGroup | None = None) -> C10dWork:
        """``tensor`` becomes that of global rank ``source``."""
        import torch.distributed as dist

        check_peer("broadcast", source, group)
        check_contiguous("broadcast", tensor)
        moved = _bytes(tensor)
        return start("broadcast", lambda: dist.broadcast(moved, source, group=group, async_op=True), (tensor,))

    def send(self, tensor: torch.Tensor, to: int, group: ProcessGroup | None = None) -> C10dWork:
        """Send to global rank ``to``."""
        import torch.distributed as dist

        check_peer("send", to, group, other=True)
        check_contiguous("send", tensor)
        moved = _bytes(tensor)
        return start(f"send to rank {to}", lambda: dist.isend(moved, to, group=group), (tensor,))

    def recv(self, tensor: torch.Tensor, source: int, group: ProcessGroup | None = None) -> C10dWork:
        """Receive from global rank ``source``."""
        import torch.distributed as dist

        check_peer("recv", source, group, other=True)
        check_contiguous("recv", tensor)
        moved = _bytes(tensor)
        return start(f"recv from rank {source}", lambda: dist.irecv(moved, source, group=group), (tensor,))

    def barrier(self, group: ProcessGroup | None = None) -> C10dWork:
        """Complete when every rank of the group has called it."""
        import torch.distributed as dist

        world_of("barrier", group)
        return start("barrier", lambda: dist.barrier(group=group, async_op=True), ())

    def _check_reduction(self, dtype: torch.dtype, op: str) -> None:
        if op not in _OPS:
            near = nearest(op, _OPS)
            hint = f"Did you mean {near!r}? " if near else ""
            raise UnsupportedError(f"Reduction {op!r}", fix=f"{hint}Valid: {', '.join(_OPS)}")
        long = str(dtype).removeprefix("torch.")
        if _SHORT.get(long, long) not in self.sums:
            raise UnsupportedError(
                f"A {op} of {long} over {self.name}",
                why="The backend cannot reduce this dtype",
                fix=f"Convert to one of {', '.join(self.sums)}",
            )


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, or its bytes where it is an 8-bit float, which gloo does not move."""
    import torch

    narrow = tensor.dtype.is_floating_point and tensor.dtype.itemsize == 1
    return tensor.view(torch.uint8) if narrow else tensor
