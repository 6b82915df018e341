"""Collectives over c10d: gloo, nccl, xccl, hccl, mpi; a backend is available when this torch has it.

Notable: a collective's sizes, dtype and membership are checked on this rank before it starts, because backends answer
a mismatch with a signal or a wait for ever; 8-bit floats are moved as bytes; and which dtype a sum is accumulated in is
stated per backend (gloo adds bf16 in bf16: 1 + 2^-8 + 2^-8 gives 1, not 1.0078125).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from polyscale import _torch
from polyscale.errors import PolyscaleError, RankError, UnsupportedError, nearest
from polyscale.hooks import PluginContext, hookimpl

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

_INTEGERS = {name: name for name in ("int64", "int32", "int8", "uint8")}
_WIDE = {"fp64": "fp64", "fp32": "fp32"}
# Measured for gloo; for the others from their documentation: each hop rounds to the dtype that is sent.
_NARROW = {"bf16": "bf16", "fp16": "fp16"}
_SHORT = {"float64": "fp64", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
_OPS = ("sum", "max", "min")


@dataclass(frozen=True)
class _Backend:
    """What differs between backends: the name, the sums, and whether it moves host tensors."""

    name: str
    sums: Mapping[str, str]
    host: bool = False


_GLOO = _Backend("gloo", MappingProxyType({**_WIDE, **_NARROW, **_INTEGERS}), host=True)
_NCCL = _Backend("nccl", MappingProxyType({**_WIDE, **_NARROW, **_INTEGERS}))
_XCCL = _Backend("xccl", MappingProxyType({**_WIDE, **_NARROW, **_INTEGERS}))
_HCCL = _Backend("hccl", MappingProxyType({"fp32": "fp32", **_NARROW, "int64": "int64", "int32": "int32"}))
_MPI = _Backend("mpi", MappingProxyType({**_WIDE, **_INTEGERS}), host=True)


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


class C10dCommunication:
    """Collectives of one c10d backend. ``group=None`` is the default group."""

    def __init__(self, backend: _Backend) -> None:
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
                fix='Set "backends": {"communication": "auto"}',
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
        world = _world("all_gather", group)
        _check_sizes("all_gather", whole=output, part=input, world=world)
        out, inp = _bytes(output), _bytes(input)
        return _start("all_gather", lambda: _torch.all_gather(out, inp, group, async_op=True), (output, input))

    def reduce_scatter(self, output: torch.Tensor, input: torch.Tensor, group: ProcessGroup | None = None) -> C10dWork:
        """``output`` (n) receives this rank's part of the sum of every rank's ``input`` (world x n).

        Raises:
            UnsupportedError: the backend cannot sum this dtype.
        """
        world = _world("reduce_scatter", group)
        _check_sizes("reduce_scatter", whole=input, part=output, world=world)
        self._check_reduction(input.dtype, "sum")
        launch = lambda: _torch.reduce_scatter(output, input, group, async_op=True)  # noqa: E731
        return _start("reduce_scatter", launch, (output, input))

    def all_reduce(self, tensor: torch.Tensor, group: ProcessGroup | None = None, *, op: str = "sum") -> C10dWork:
        """``tensor`` becomes the ``op`` ("sum", "max", "min") over ranks.

        Raises:
            UnsupportedError: the backend cannot reduce this dtype.
        """
        import torch.distributed as dist

        _world("all_reduce", group)
        _check_contiguous("all_reduce", tensor)
        self._check_reduction(tensor.dtype, op)
        kind = getattr(dist.ReduceOp, op.upper())
        return _start("all_reduce", lambda: dist.all_reduce(tensor, kind, group=group, async_op=True), (tensor,))

    def all_to_all(self, output: torch.Tensor, input: torch.Tensor, group: ProcessGroup | None = None) -> C10dWork:
        """Equal parts of ``input`` go to each rank; ``output`` receives one from each."""
        import torch.distributed as dist

        world = _world("all_to_all", group)
        _check_sizes("all_to_all", whole=output, part=input, world=1)
        if input.numel() % world:
            raise PolyscaleError(
                f"all_to_all of {input.numel()} elements over {world} ranks",
                why="Each rank is sent an equal part",
                fix=f"Give a multiple of {world}",
            )
        out, inp = _bytes(output).view(-1), _bytes(input).view(-1)
        launch = lambda: dist.all_to_all_single(out, inp, group=group, async_op=True)  # noqa: E731
        return _start("all_to_all", launch, (output, input))

    def broadcast(self, tensor: torch.Tensor, source: int, group: ProcessGroup | None = None) -> C10dWork:
        """``tensor`` becomes that of global rank ``source``."""
        import torch.distributed as dist

        _check_peer("broadcast", source, group)
        _check_contiguous("broadcast", tensor)
        moved = _bytes(tensor)
        return _start("broadcast", lambda: dist.broadcast(moved, source, group=group, async_op=True), (tensor,))

    def send(self, tensor: torch.Tensor, to: int, group: ProcessGroup | None = None) -> C10dWork:
        """Send to global rank ``to``."""
        import torch.distributed as dist

        _check_peer("send", to, group, other=True)
        _check_contiguous("send", tensor)
        moved = _bytes(tensor)
        return _start(f"send to rank {to}", lambda: dist.isend(moved, to, group=group), (tensor,))

    def recv(self, tensor: torch.Tensor, source: int, group: ProcessGroup | None = None) -> C10dWork:
        """Receive from global rank ``source``."""
        import torch.distributed as dist

        _check_peer("recv", source, group, other=True)
        _check_contiguous("recv", tensor)
        moved = _bytes(tensor)
        return _start(f"recv from rank {source}", lambda: dist.irecv(moved, source, group=group), (tensor,))

    def barrier(self, group: ProcessGroup | None = None) -> C10dWork:
        """Complete when every rank of the group has called it."""
        import torch.distributed as dist

        _world("barrier", group)
        return _start("barrier", lambda: dist.barrier(group=group, async_op=True), ())

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


def _start(what: str, launch: Callable[[], Any], tensors: Sequence[torch.Tensor]) -> C10dWork:
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


def _world(what: str, group: ProcessGroup | None) -> int:
    """Size of the group.

    Raises:
        PolyscaleError: there is no default group, or this rank is not in ``group``.
    """
    import torch.distributed as dist

    if not dist.is_initialized():
        raise PolyscaleError(what, why="There is no process group", fix="Call polyscale.initialize first")
    world = dist.get_world_size(group)
    if world < 1:
        raise PolyscaleError(what, why=f"rank {dist.get_rank()} is not a member of the group")
    return world


def _check_peer(what: str, rank: int, group: ProcessGroup | None, *, other: bool = False) -> None:
    import torch.distributed as dist

    _world(what, group)
    ranks = dist.get_process_group_ranks(group)
    if rank not in ranks:
        raise PolyscaleError(f"{what} with rank {rank}", why=f"The group holds ranks {_spans(ranks)}")
    if other and rank == dist.get_rank():
        raise PolyscaleError(f"{what} with rank {rank}", why="That is this rank itself")


def _spans(ranks: Sequence[int]) -> str:
    shown = ", ".join(str(rank) for rank in ranks[:16])
    return shown if len(ranks) <= 16 else f"{shown}, ... ({len(ranks)} in all)"


def _check_contiguous(what: str, *tensors: torch.Tensor) -> None:
    for tensor in tensors:
        if not tensor.is_contiguous():
            raise PolyscaleError(
                f"{what} of a tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()}",
                why="It is not contiguous",
                fix="Give tensor.contiguous()",
            )


def _check_sizes(what: str, *, whole: torch.Tensor, part: torch.Tensor, world: int) -> None:
    _check_contiguous(what, whole, part)
    if whole.dtype != part.dtype or whole.device != part.device:
        raise PolyscaleError(
            f"{what} between {whole.dtype} on {whole.device} and {part.dtype} on {part.device}",
            why="Dtypes and devices must be equal",
        )
    if whole.numel() != world * part.numel():
        raise PolyscaleError(
            f"{what} with {whole.numel()} elements on one side and {part.numel()} on the other",
            why=f"Over {world} ranks the larger side needs {world * part.numel()}",
        )


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, or its bytes where it is an 8-bit float, which gloo does not move."""
    import torch

    narrow = tensor.dtype.is_floating_point and tensor.dtype.itemsize == 1
    return tensor.view(torch.uint8) if narrow else tensor


class _C10dPlugin:
    interface_version = (1, 0)
    _backend: _Backend

    @hookimpl
    def polyscale_communication(self, context: PluginContext) -> C10dCommunication:
        """Make the collectives of this backend."""
        return C10dCommunication(self._backend)


class GlooPlugin(_C10dPlugin):
    """Hands over gloo: host tensors over TCP."""

    _backend = _GLOO


class NcclPlugin(_C10dPlugin):
    """Hands over nccl."""

    _backend = _NCCL


class XcclPlugin(_C10dPlugin):
    """Hands over xccl."""

    _backend = _XCCL


class HcclPlugin(_C10dPlugin):
    """Hands over hccl."""

    _backend = _HCCL


class MpiPlugin(_C10dPlugin):
    """Hands over mpi."""

    _backend = _MPI
