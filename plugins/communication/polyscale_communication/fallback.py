"""The collectives of a group that gets no shared memory, over gloo: the same operations, dtypes and rounding.

Notable: 16-bit floats are summed in fp32 and rounded once, as over shared memory; what gloo lacks is made of what it
has. Where a result must be worked on after gloo, the call blocks. The order of addition is gloo's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from polyscale_communication.numbers import OPERATIONS, Reduction
from polyscale_communication.work import EndedWork
from polyscale_standard.communication import _torch

Tensors = Sequence[torch.Tensor]
_OWN = (
    torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int8, torch.uint8
)  # fmt: skip
_NARROW = (torch.bfloat16, torch.float16)
_OF_BOOL = {"sum": "max", "product": "min", "band": "min", "bor": "max"}


class Gloo:
    """The interface of :class:`polyscale_communication.engine.Engine` over a gloo group."""

    def __init__(self, group: Any, rank: int, size: int) -> None:
        self._group = group
        self._rank = rank
        self._size = size

    def all_reduce(self, tensor: torch.Tensor, reduction: Reduction, opts: Any) -> Any:
        """See :class:`polyscale_communication.engine.Engine`."""
        change = _Change(reduction, tensor.dtype, self._size)
        if change.needless:
            return self._group.allreduce([tensor], _torch.allreduce_options(change.operation))
        wide = change.before(tensor)
        self._group.allreduce([wide], _torch.allreduce_options(change.operation)).wait()
        tensor.copy_(change.after(wide))
        return EndedWork([tensor])

    def reduce(self, tensor: torch.Tensor, reduction: Reduction, root: int, opts: Any) -> Any:
        """See :class:`polyscale_communication.engine.Engine`."""
        change = _Change(reduction, tensor.dtype, self._size)
        wide = change.before(tensor)  # a copy: gloo uses that of the others as a scratch pad
        self._group.reduce([wide], _torch.reduce_options(change.operation, root)).wait()
        if root == self._rank:
            tensor.copy_(change.after(wide))
        return EndedWork([tensor])

    def reduce_scatter(self, output: torch.Tensor, input: torch.Tensor, reduction: Reduction, opts: Any) -> Any:
        """See :class:`polyscale_communication.engine.Engine`."""
        change = _Change(reduction, input.dtype, self._size)
        options = _torch.reduce_scatter_options(change.operation)
        if change.needless:
            return self._group._reduce_scatter_base(output.view(-1), input.view(-1), options)
        wide = change.before(input.view(-1))
        part = wide.new_empty(output.numel(), *wide.shape[1:])
        self._group._reduce_scatter_base(part, wide, options).wait()
        output.view(-1).copy_(change.after(part))
        return EndedWork([output])

    def reduce_scatter_list(self, output: torch.Tensor, inputs: Tensors, reduction: Reduction, opts: Any) -> Any:
        """See :class:`polyscale_communication.engine.Engine`."""
        whole = torch.cat([part.reshape(-1) for part in inputs])
        self.all_reduce(whole, reduction, opts).wait()
        part = torch.split(whole, [each.numel() for each in inputs])[self._rank]
        output.view(-1).copy_(part)
        return EndedWork([output])

    def broadcast(self, tensor: torch.Tensor, root: int, opts: Any) -> Any:
        """See :class:`polyscale_communication.engine.Engine`."""
        return self._group.broadcast([_flat(tensor)], _torch.broadcast_options(root))

    def all_gather(self, output: torch.Tensor, input: torch.Tensor, opts: Any) -> Any:
        """See :class:`polyscale_communication.engine.Engine`."""
        return self._group._allgather_base(_flat(output), _flat(input))

    def all_gather_list(self, outputs: Tensors, input: torch.Tensor, opts: Any) -> Any:
        """See :class:`polyscale_communication.engine.Engine`."""
        return self._group.allgather([[_flat(part) for part in outputs]], [_flat(input)])

    def gather(self, outputs: Tensors, input: torch.Tensor, root: int, opts: Any) -> Any:
        """See :class:`polyscale_communication.engine.Engine`."""
        lists = [[_flat(part) for part in outputs]] if root == self._rank else []
        return self._group.gather(lists, [_flat(input)], _torch.gather_options(root))

    def scatter(self, output: torch.Tensor, inputs: Tensors, root: int, opts: Any) -> Any:
        """See :class:`polyscale_communication.engine.Engine`."""
        lists = [[_flat(part) for part in inputs]] if root == self._rank else []
        return self._group.scatter([_flat(output)], lists, _torch.scatter_options(root))

    def all_to_all(
        self, output: torch.Tensor, input: torch.Tensor, receives: Sequence[int], sends: Sequence[int], opts: Any
    ) -> Any:
        """See :class:`polyscale_communication.engine.Engine`."""
        target, source = _flat(output), _flat(input)
        times = input.itemsize // source.itemsize
        return self._group.alltoall_base(target, source, [n * times for n in receives], [n * times for n in sends])

    def all_to_all_list(self, outputs: Tensors, inputs: Tensors, opts: Any) -> Any:
        """See :class:`polyscale_communication.engine.Engine`."""
        receives, sends = ([tensor.numel() for tensor in tensors] for tensors in (outputs, inputs))
        source = torch.cat([tensor.reshape(-1) for tensor in inputs])
        target = source.new_empty(sum(receives))
        self.all_to_all(target, source, receives, sends, opts).wait()
        for tensor, part in zip(outputs, torch.split(target, receives), strict=True):
            tensor.view(-1).copy_(part)
        return EndedWork(outputs)

    def barrier(self, opts: Any) -> Any:
        """See :class:`polyscale_communication.engine.Engine`."""
        return self._group.barrier()

    def send(self, tensor: torch.Tensor, to: int, tag: int) -> Any:
        """See :class:`polyscale_communication.engine.Engine`."""
        return self._group.send([_flat(tensor)], to, tag)

    def recv(self, tensor: torch.Tensor, source: int, tag: int) -> Any:
        """See :class:`polyscale_communication.engine.Engine`."""
        if source < 0:
            return self._group.recv_anysource([_flat(tensor)], tag)
        return self._group.recv([_flat(tensor)], source, tag)

    def close(self) -> None:
        """Let go of the group."""
        self._group = _Ended()


class _Ended:
    """In the place of a group that was destroyed."""

    def __getattr__(self, collective: str) -> Any:
        raise RuntimeError(f"{collective}: the group was destroyed")


class _Change:
    """What is done to a tensor before and after the operation that gloo has."""

    def __init__(self, reduction: Reduction, dtype: torch.dtype, size: int) -> None:
        name = OPERATIONS[reduction.operation]
        self._name, self._factor, self._dtype, self._size = name, reduction.factor, dtype, size
        gloo = _OF_BOOL.get(name, name) if dtype == torch.bool else "sum" if name in ("avg", "premul_sum") else name
        self.operation = getattr(dist.ReduceOp, gloo.upper())
        self.needless = dtype in _OWN and dtype not in _NARROW and name == gloo

    def before(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy to give to gloo, which knows no complex numbers: pairs of real ones, in a last dimension."""
        given = tensor.to(self._wide(), copy=True)
        given = torch.view_as_real(given) if given.is_complex() else given
        return given.mul_(self._factor) if self._name == "premul_sum" else given

    def _wide(self) -> torch.dtype:
        """What is summed in. The sum of which an average is taken may be more than a small integer holds."""
        if self._dtype in _NARROW:
            return torch.float32
        if self._dtype == torch.complex32:
            return torch.complex64
        if self._dtype == torch.bool:
            return torch.uint8
        small = self._dtype == torch.int16 or (self._name == "avg" and self._dtype in (torch.int8, torch.uint8))
        return torch.int32 if small else self._dtype

    def after(self, result: torch.Tensor) -> torch.Tensor:
        """Turn gloo's result into that of the reduction."""
        if self._dtype.is_complex:
            result = torch.view_as_complex(result)
        if self._name == "avg":
            result = result / self._size if result.is_floating_point() or result.is_complex() else result // self._size
        return result.to(self._dtype)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The elements as a 1-D tensor of a dtype that gloo moves; the same memory."""
    line = tensor.view(-1)
    return line if line.dtype in _OWN else line.view(torch.uint8)
