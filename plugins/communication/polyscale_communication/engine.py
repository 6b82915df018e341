"""Collectives over the transport: what each reads and writes, as addresses.

Notable: one call of the transport carries a collective out. Where the caller waits anyway it is made on the caller's
thread; else it is queued, and the works of collectives that have not ended are kept, so that their tensors live.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch

from polyscale_communication.numbers import NO_OPERATION, Kind, Reduction, number_of
from polyscale_communication.settler import Settler
from polyscale_communication.work import EndedWork, ManyWorks, MessageWork, ShmWork

Tensors = Sequence[torch.Tensor]
_NOWHERE = 64  # the address of a tensor without elements: never followed, and not that of a tensor that is absent


class Engine:
    """The collectives of one group. Tensors are contiguous and on the host; roots are ranks of the group."""

    def __init__(self, transport: Any, rank: int, size: int, timeout: timedelta) -> None:
        self._transport = transport
        self._rank = rank
        self._size = size
        self.timeout_s = timeout.total_seconds()
        self._under_way: deque[ShmWork] = deque()
        self._lock = threading.Lock()  # threads may send and receive at once, each by its tag
        self._settler = Settler()

    def all_reduce(self, tensor: torch.Tensor, reduction: Reduction, opts: Any) -> Any:
        """``tensor`` becomes the reduction of all ranks'."""
        at = tensor.data_ptr() or _NOWHERE
        call = (*_reduced(Kind.ALL_REDUCE, reduction, -1, tensor), at, at, reduction.factor)
        return self._simple(call, (tensor,), (tensor,), opts)

    def reduce(self, tensor: torch.Tensor, reduction: Reduction, root: int, opts: Any) -> Any:
        """The root's tensor becomes the reduction of all ranks'; the others keep theirs."""
        at = tensor.data_ptr() or _NOWHERE
        out = at if root == self._rank else 0
        call = (*_reduced(Kind.REDUCE, reduction, root, tensor), at, out, reduction.factor)
        return self._simple(call, (tensor,), (tensor,), opts)

    def reduce_scatter(self, output: torch.Tensor, input: torch.Tensor, reduction: Reduction, opts: Any) -> Any:
        """``output`` (n) receives this rank's part of the reduction of ``input`` (world x n)."""
        ins, outs = input.data_ptr() or _NOWHERE, output.data_ptr() or _NOWHERE
        call = (*_reduced(Kind.REDUCE_SCATTER, reduction, -1, output), ins, outs, reduction.factor)
        return self._simple(call, (output,), (input, output), opts)

    def reduce_scatter_list(self, output: torch.Tensor, inputs: Tensors, reduction: Reduction, opts: Any) -> Any:
        """``output`` receives the reduction of every rank's ``inputs[rank]``; parts may differ in size."""
        count = output.numel() * reduction.times
        uneven = any(part.numel() != output.numel() for part in inputs)
        what = (Kind.REDUCE_SCATTER, reduction.dtype, reduction.operation, -1, 0 if uneven else count)
        pieces = (_pieces(inputs), _pieces([output]), uneven, reduction.factor)
        return self._listed(what, pieces, (output,), (*inputs, output), opts)

    def broadcast(self, tensor: torch.Tensor, root: int, opts: Any) -> Any:
        """``tensor`` becomes the root's."""
        at = tensor.data_ptr() or _NOWHERE
        ends = (at, 0) if root == self._rank else (0, at)
        return self._move(Kind.BROADCAST, root, tensor, ends, (tensor,), (tensor,), opts)

    def all_gather(self, output: torch.Tensor, input: torch.Tensor, opts: Any) -> Any:
        """``output`` (world x n) receives every rank's ``input`` (n), in rank order."""
        ends = (input.data_ptr() or _NOWHERE, output.data_ptr() or _NOWHERE)
        return self._move(Kind.ALL_GATHER, -1, input, ends, (output,), (input, output), opts)

    def all_gather_list(self, outputs: Tensors, input: torch.Tensor, opts: Any) -> Any:
        """Each of ``outputs`` receives one rank's ``input``."""
        what = self._what(Kind.ALL_GATHER, -1, input, False)
        return self._listed(what, (_pieces([input]), _pieces(outputs), False, 1.0), outputs, (input, *outputs), opts)

    def gather(self, outputs: Tensors, input: torch.Tensor, root: int, opts: Any) -> Any:
        """The root's ``outputs`` receive one rank's ``input`` each."""
        what = self._what(Kind.GATHER, root, input, False)
        return self._listed(what, (_pieces([input]), _pieces(outputs), False, 1.0), outputs, (input, *outputs), opts)

    def scatter(self, output: torch.Tensor, inputs: Tensors, root: int, opts: Any) -> Any:
        """``output`` receives this rank's element of the root's ``inputs``."""
        what = self._what(Kind.SCATTER, root, output, False)
        return self._listed(what, (_pieces(inputs), _pieces([output]), False, 1.0), (output,), (output, *inputs), opts)

    def all_to_all(
        self, output: torch.Tensor, input: torch.Tensor, receives: Sequence[int], sends: Sequence[int], opts: Any
    ) -> Any:
        """Piece r of the input goes to rank r; the output holds one piece of each rank. Pieces are in elements."""
        what = self._what(Kind.ALL_TO_ALL, -1, input, True)
        pieces = (_cut(input, sends), _cut(output, receives), True, 1.0)
        return self._listed(what, pieces, (output,), (input, output), opts)

    def all_to_all_list(self, outputs: Tensors, inputs: Tensors, opts: Any) -> Any:
        """Tensor r of the inputs goes to rank r; tensor r of the outputs comes from it."""
        what = self._what(Kind.ALL_TO_ALL, -1, inputs[0], True)
        return self._listed(what, (_pieces(inputs), _pieces(outputs), True, 1.0), outputs, (*inputs, *outputs), opts)

    def barrier(self, opts: Any) -> Any:
        """Complete when every rank has called it."""
        return self._simple((Kind.BARRIER, 0, NO_OPERATION, -1, 0, 0, 0, 1.0), (), (), opts)

    def send(self, tensor: torch.Tensor, to: int, tag: int) -> Any:
        """Send to rank ``to``; complete when it has received."""
        return self._message(True, to, tag, tensor)

    def recv(self, tensor: torch.Tensor, source: int, tag: int) -> Any:
        """Receive from rank ``source``; -1: from any."""
        return self._message(False, source, tag, tensor)

    def close(self) -> None:
        """End the group: what is under way fails."""
        self._transport.close()
        self._settler.close()
        with self._lock:
            self._under_way.clear()

    def _move(
        self, kind: Kind, root: int, like: torch.Tensor, at: tuple[int, int], results: Tensors, keep: Tensors, opts: Any
    ) -> Any:
        dtype, times = number_of(like.dtype)
        return self._simple((kind, dtype, NO_OPERATION, root, like.numel() * times, *at, 1.0), results, keep, opts)

    def _what(self, kind: Kind, root: int, like: torch.Tensor, uneven: bool) -> tuple[int, int, int, int, int]:
        dtype, times = number_of(like.dtype)
        return (kind, dtype, NO_OPERATION, root, 0 if uneven else like.numel() * times)

    def _simple(self, call: tuple[Any, ...], results: Tensors, keep: Tensors, opts: Any) -> Any:
        seconds = self._seconds(opts)
        if not getattr(opts, "asyncOp", True):
            self._transport.run(*call, seconds)
            return EndedWork(results)
        return self._note(self._transport.submit(*call, seconds), results, keep)

    def _listed(
        self, what: tuple[int, ...], pieces: tuple[Any, ...], results: Tensors, keep: Tensors, opts: Any
    ) -> Any:
        seconds = self._seconds(opts)
        if not getattr(opts, "asyncOp", True):
            self._transport.run_listed(*what, *pieces, seconds)
            return EndedWork(results)
        return self._note(self._transport.submit_listed(*what, *pieces, seconds), results, keep)

    def _note(self, job: Any, results: Tensors, keep: Tensors) -> Any:
        work = ShmWork(self._transport, job, results, keep, self._settler)
        self._keep(work)
        return work

    def _message(self, sends: bool, peer: int, tag: int, tensor: torch.Tensor) -> Any:
        dtype, _ = number_of(tensor.dtype)
        size = tensor.numel() * tensor.itemsize
        job = self._transport.message(sends, peer, tag, dtype, tensor.data_ptr(), size, self.timeout_s)
        work = MessageWork(self._transport, job, [] if sends else [tensor], tensor, self._settler)
        self._keep(work)
        return work

    def _keep(self, work: ShmWork) -> None:
        """Hold the work until it has ended. Collectives end in their order, messages in any."""
        with self._lock:
            self._under_way.append(work)
            for _ in range(min(len(self._under_way) - 1, 4)):
                first = self._under_way.popleft()
                if not first.is_completed():
                    self._under_way.append(first)

    def _seconds(self, opts: Any) -> float:
        given = getattr(opts, "timeout", None)
        seconds = given.total_seconds() if given is not None else 0.0
        return seconds if seconds > 0 else self.timeout_s


def many(works: Sequence[Any], results: Tensors) -> Any:
    """One work for several."""
    return works[0] if len(works) == 1 else ManyWorks(works, results)


def _reduced(kind: Kind, reduction: Reduction, root: int, like: torch.Tensor) -> tuple[int, int, int, int, int]:
    return (kind, reduction.dtype, reduction.operation, root, like.numel() * reduction.times)


def _pieces(tensors: Tensors) -> list[tuple[int, int]]:
    return [(tensor.data_ptr() or _NOWHERE, tensor.numel() * tensor.itemsize) for tensor in tensors]


def _cut(tensor: torch.Tensor, counts: Sequence[int]) -> list[tuple[int, int]]:
    at, size, pieces = tensor.data_ptr() or _NOWHERE, tensor.itemsize, []
    for count in counts:
        pieces.append((at, count * size))
        at += count * size
    return pieces
