"""ShmProcessGroup: the c10d process group of host tensors through shared memory.

Notable: it has to be a ``ProcessGroup``, because c10d's ``Backend`` cannot be overridden in Python. What is odd goes
to a gloo group that is made when it is first needed: sparse tensors; and everything, where the ranks have agreed that
they get no shared memory. Tensors that are not contiguous are moved through a copy, and then the call blocks.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist

from polyscale import env
from polyscale_communication import NAME, checks
from polyscale_communication.engine import Engine, many
from polyscale_communication.fallback import Gloo
from polyscale_communication.numbers import reduction_of
from polyscale_communication.settings import MIB, current
from polyscale_communication.setup import agree
from polyscale_standard.communication import _torch, group_checks

logger = logging.getLogger("polyscale")
Tensors = list[torch.Tensor]


def register_backend() -> None:
    """See ``polyscale_communication.register``."""
    if not dist.is_backend_available(NAME):
        dist.Backend.register_backend(NAME, ShmProcessGroup, devices=["cpu"])


class ShmProcessGroup(_torch.ProcessGroup):  # type: ignore[misc]
    """The methods are those of ``torch.distributed.ProcessGroup``, which calls them.

    Attributes:
        timeout_s: seconds until a collective gives up.
        transport: of ``polyscale_shm``; None: everything goes through gloo.
        why_gloo: why everything goes through gloo; "": it does not.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._rank, self._size = rank, size
        self._timeout, self._pid = timeout, os.getpid()
        self.timeout_s = timeout.total_seconds()
        self._inner_store = _torch.PrefixStore("gloo", store)
        self._inner: Any = None
        self._coalescing: list[Any] | None = None
        self._name = ""
        settings = current()
        agreement = agree(store, rank, size, timeout, settings)
        self.why_gloo = agreement.why
        if agreement.transport is None:
            if rank == 0 and size > 1:
                level = logging.WARNING if env.launch().rank == 0 else logging.INFO
                _say_once(level, f"shm: groups use gloo, because there is no shared memory: {agreement.why}")
            self._engine: Any = Gloo(self._gloo(), rank, size)
        else:
            _keep_memory(int(settings.keep_mib * MIB))
            self._engine = Engine(agreement.transport, rank, size, timeout)
        self.transport = agreement.transport
        self._close = weakref.finalize(self, _close, self._engine, self._pid)

    def getBackendName(self) -> str:
        """The name c10d shows."""
        return NAME

    # c10d keeps the name of a group with its backends, of which this one has none.

    def setGroupName(self, name: str) -> None:
        """The name by which functional collectives know the group."""
        self._name = name

    _set_group_name = setGroupName

    def getGroupName(self) -> str:
        """See ``setGroupName``."""
        return self._name

    @property
    def group_name(self) -> str:
        """See ``setGroupName``."""
        return self._name

    def shutdown(self) -> None:
        """End the group: what is under way fails, and what it has mapped is unmapped."""
        self._close()
        self._inner = None

    abort = shutdown

    # Reductions

    def allreduce(self, tensors: Any, opts: Any = None, **old: Any) -> Any:
        """Every tensor becomes the reduction of all ranks' (in place)."""
        tensors = _listed(tensors)
        if tensors[0].layout != torch.strided:
            return self._gloo().allreduce(tensors, opts or _torch.allreduce_options(dist.ReduceOp.SUM))
        return self._each([(tensor,) for tensor in tensors], self._all_reduce, opts, tensors)

    def _all_reduce(self, tensor: torch.Tensor, opts: Any) -> Any:
        reduction = self._reduction(opts, tensor)
        return self._in_memory([tensor], [], lambda t, _: self._engine.all_reduce(t[0], reduction, opts), in_place=True)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Any, opts: Any, **old: Any) -> Any:
        """The root's tensor becomes the reduction of all ranks'."""
        tensor = _listed(tensors)[0]
        reduction, root = self._reduction(opts, tensor), checks.check_root("reduce", opts.rootRank, self._size)
        call = lambda t, _: self._engine.reduce(t[0], reduction, root, opts)  # noqa: E731
        return self._note(self._in_memory([tensor], [], call, in_place=True))

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None, **old: Any) -> Any:
        """Each output receives this rank's part of the reduction of a list of one tensor for every rank."""
        outputs = _listed(outputs)
        inputs = [inputs] if isinstance(inputs[0], torch.Tensor) else inputs
        return self._each(list(zip(outputs, inputs, strict=True)), self._reduce_scatter_list, opts, outputs)

    def _reduce_scatter_list(self, output: torch.Tensor, parts: Tensors, opts: Any) -> Any:
        group_checks.check_list("reduce_scatter", parts, self._size)
        group_checks.check_same(output, [parts[self._rank]], parts)
        reduction = self._reduction(opts, output)
        call = lambda outs, ins: self._engine.reduce_scatter_list(outs[0], ins, reduction, opts)  # noqa: E731
        return self._in_memory([output], parts, call)

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Any:
        """The output (n) receives this rank's part of the reduction of the input (world x n)."""
        return self._note(self._reduce_scatter(output, input, opts))

    def _reduce_scatter(self, output: torch.Tensor, input: torch.Tensor, opts: Any) -> Any:
        group_checks.check_parts("reduce_scatter", whole=input, part=output, size=self._size)
        reduction = self._reduction(opts, output)
        call = lambda outs, ins: self._engine.reduce_scatter(outs[0], ins[0], reduction, opts)  # noqa: E731
        return self._in_memory([output], [input], call)

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Any:
        """``reduce_scatter_single`` of several tensors."""
        return self._each(list(zip(outputs, inputs, strict=True)), self._reduce_scatter, opts, outputs)

    # Movements

    def broadcast(self, tensors: Any, opts: Any, **old: Any) -> Any:
        """Every tensor becomes the root's."""
        tensor = _listed(tensors)[opts.rootTensor]
        root = checks.check_root("broadcast", opts.rootRank, self._size)
        call = lambda t, _: self._engine.broadcast(t[0], root, opts)  # noqa: E731
        return self._note(self._in_memory([tensor], [], call, in_place=True))

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None, **old: Any) -> Any:
        """Each list receives one tensor of every rank."""
        inputs = _listed(inputs)
        lists = [outputs] if isinstance(outputs[0], torch.Tensor) else outputs
        results = [tensor for each in lists for tensor in each]
        return self._each(list(zip(lists, inputs, strict=True)), self._all_gather_list, opts, results)

    def _all_gather_list(self, parts: Tensors, input: torch.Tensor, opts: Any) -> Any:
        group_checks.check_list("all_gather", parts, self._size)
        group_checks.check_same(input, parts)
        return self._in_memory(parts, [input], lambda outs, ins: self._engine.all_gather_list(outs, ins[0], opts))

    allgather_coalesced = allgather

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Any:
        """The output (world x n) receives every rank's input (n), in rank order."""
        return self._note(self._all_gather(output, input, opts))

    def _all_gather(self, output: torch.Tensor, input: torch.Tensor, opts: Any) -> Any:
        group_checks.check_parts("all_gather", whole=output, part=input, size=self._size)
        return self._in_memory([output], [input], lambda outs, ins: self._engine.all_gather(outs[0], ins[0], opts))

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Any:
        """``all_gather_single`` of several tensors."""
        return self._each(list(zip(outputs, inputs, strict=True)), self._all_gather, opts, outputs)

    def gather(self, outputs: Any, inputs: Any, opts: Any, **old: Any) -> Any:
        """The root's list receives one tensor of every rank."""
        input, parts = _listed(inputs)[0], []
        if checks.check_root("gather", opts.rootRank, self._size) == self._rank:
            parts = outputs if isinstance(outputs[0], torch.Tensor) else outputs[0]
            group_checks.check_list("gather", parts, self._size)
        group_checks.check_same(input, parts)
        call = lambda outs, ins: self._engine.gather(outs, ins[0], opts.rootRank, opts)  # noqa: E731
        return self._note(self._in_memory(parts, [input], call))

    def scatter(self, outputs: Any, inputs: Any, opts: Any, **old: Any) -> Any:
        """The output receives this rank's element of the root's list."""
        output, parts = _listed(outputs)[0], []
        if checks.check_root("scatter", opts.rootRank, self._size) == self._rank:
            parts = inputs if isinstance(inputs[0], torch.Tensor) else inputs[0]
            group_checks.check_list("scatter", parts, self._size)
        group_checks.check_same(output, parts)
        call = lambda outs, ins: self._engine.scatter(outs[0], ins, opts.rootRank, opts)  # noqa: E731
        return self._note(self._in_memory([output], parts, call))

    def all_to_all_single(
        self, output: torch.Tensor, input: torch.Tensor, receives: list[int], sends: list[int], opts: Any = None
    ) -> Any:
        """Rows of the input go to each rank by ``sends`` (equal parts when empty); ``receives`` rows come from each."""
        group_checks.check_same(input, [], [output])
        sizes = [
            group_checks.elements(tensor, rows, self._size) for tensor, rows in ((output, receives), (input, sends))
        ]
        call = lambda outs, ins: self._engine.all_to_all(outs[0], ins[0], *sizes, opts)  # noqa: E731
        return self._note(self._in_memory([output], [input], call))

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Any:
        """Tensor r of the inputs goes to rank r; tensor r of the outputs comes from it."""
        for parts in (outputs, inputs):
            group_checks.check_list("all_to_all", parts, self._size)
            group_checks.check_same(inputs[0], [], parts)
        call = lambda outs, ins: self._engine.all_to_all_list(outs, ins, opts)  # noqa: E731
        return self._note(self._in_memory(outputs, inputs, call))

    # Pairs of ranks, and nobody's data

    def send(self, tensors: Tensors, to: int, tag: int = 0) -> Any:
        """Send to rank ``to`` of the group."""
        checks.check_peer("send", to, self._rank, self._size)
        return self._note(self._engine.send(checks.contiguous(tensors[0]), to, tag))

    def recv(self, tensors: Tensors, source: int, tag: int = 0) -> Any:
        """Receive from rank ``source`` of the group."""
        checks.check_peer("recv", source, self._rank, self._size)
        return self._note(self._engine.recv(checks.contiguous(tensors[0]), source, tag))

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> Any:
        """Receive from any rank."""
        return self._note(self._engine.recv(checks.contiguous(tensors[0]), -1, tag))

    def barrier(self, opts: Any = None, **old: Any) -> Any:
        """Every rank has called it, and its earlier collectives are done."""
        return self._note(self._engine.barrier(opts))

    # Names of torch before 2.13, and aliases that it still calls

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # Several calls as one

    def _start_coalescing(self, _device: torch.device) -> None:
        self._coalescing = []

    def _end_coalescing(self, _device: torch.device) -> Any:
        works, self._coalescing = self._coalescing or [], None
        return many(works, [])

    # Inner parts

    def _gloo(self) -> Any:
        """The gloo group for what is odd; every rank makes it at the same call."""
        if self._inner is None:
            self._inner = _torch.gloo(self._inner_store, self._rank, self._size, self._timeout)
        return self._inner

    def _each(self, calls: Sequence[tuple[Any, ...]], call: Callable[..., Any], opts: Any, results: Tensors) -> Any:
        return self._note(many([call(*each, opts) for each in calls], results))

    def _in_memory(
        self, outputs: Tensors, inputs: Tensors, call: Callable[[Tensors, Tensors], Any], *, in_place: bool = False
    ) -> Any:
        """Call with contiguous tensors of the host; what was not contiguous is copied back when it has ended."""
        if all(tensor.is_contiguous() and tensor.is_cpu for tensor in (*outputs, *inputs)):
            return call(outputs, inputs)
        for tensor in (*outputs, *inputs):
            checks.check_host(tensor)
        copies = [checks.copied(tensor, filled=in_place) for tensor in outputs]
        work = call(copies, [tensor.contiguous() for tensor in inputs])
        work.wait()
        for tensor, copy in zip(outputs, copies, strict=True):
            if copy is not tensor:
                tensor.copy_(copy)
        return work

    def _note(self, work: Any) -> Any:
        if self._coalescing is not None:
            self._coalescing.append(work)
        return work

    def _reduction(self, opts: Any, tensor: torch.Tensor) -> Any:
        return reduction_of(dist.ReduceOp.SUM if opts is None else opts.reduceOp, tensor.dtype)


def _close(engine: Any, pid: int) -> None:
    if pid == os.getpid():  # a forked child has no part in its parent's groups
        engine.close()


def _listed(tensors: Any) -> Any:
    return [tensors] if isinstance(tensors, torch.Tensor) else tensors


def _keep_memory(size: int) -> None:
    from polyscale_shm import native

    native().keep(size)


@lru_cache(maxsize=8)
def _say_once(level: int, message: str) -> None:
    logger.log(level, "%s", message)
