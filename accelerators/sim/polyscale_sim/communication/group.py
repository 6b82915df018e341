"""SimProcessGroup: the c10d process group of the simulated device, over two gloo groups.

Notable: host tensors go to one gloo group as they are. Collectives of device tensors go through a queue of their own to
the other, which works on views of the device's memory. torch takes a Python process group whole, so this one serves
both kinds of tensors ("cpu:gloo,sim:simccl"), and it has to be a ``ProcessGroup``: c10d's ``Backend`` cannot be
overridden in Python. Device tensors must be contiguous, as nccl demands. Synchronizing the device does not complete
a collective, as it would on other devices: only its work does.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from polyscale_sim import faults
from polyscale_sim.communication import NAME, calls, pairs
from polyscale_sim.communication.memory import Direct, Late
from polyscale_sim.communication.queue import CommunicationQueue, Job
from polyscale_sim.communication.reductions import reduction_of
from polyscale_sim.communication.signature import compare
from polyscale_sim.communication.work import ManyWorks, PairWork, SimWork
from polyscale_standard.communication import _torch, group_checks

Tensors = list[torch.Tensor]


def register_backend(device_type: str) -> None:
    """See ``polyscale_sim.communication.register``."""

    def create(store: Any, rank: int, size: int, timeout: timedelta) -> SimProcessGroup:
        return SimProcessGroup(store, rank, size, timeout, device_type=device_type)

    dist.Backend.register_backend(NAME, create, devices=[device_type])


class SimProcessGroup(_torch.ProcessGroup):  # type: ignore[misc]
    """The methods are those of ``torch.distributed.ProcessGroup``, which calls them."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta, *, device_type: str) -> None:
        super().__init__(rank, size)
        self._device_type = device_type
        self._host = _torch.ProcessGroupGloo(_torch.PrefixStore("host", store), rank, size, timeout)
        self._wire = _torch.ProcessGroupGloo(_torch.PrefixStore("device", store), rank, size, timeout)
        self._register_backend(torch.device("cpu"), self.BackendType.GLOO, self._host)
        # Collectives that Python cannot override in C++ would come here, and gloo refuses tensors of the device.
        self._register_backend(torch.device(device_type), self.BackendType.CUSTOM, self._wire)
        self._set_default_backend(self.BackendType.CUSTOM)
        self._queue = CommunicationQueue()
        self._lines: dict[tuple[int | None, int], CommunicationQueue] = {}
        self._streams: dict[torch.device, torch.Stream] = {}
        self._late: list[tuple[Job, Late]] = []
        self._coalescing: list[Any] | None = None
        weakref.finalize(self, _close, self._queue, self._lines)

    def getBackendName(self) -> str:
        """The name c10d shows."""
        return NAME

    # Reductions

    def allreduce(self, tensors: Tensors, opts: Any = None, **old: Any) -> Any:
        """Every tensor becomes the reduction of all ranks' (in place)."""
        tensors = _listed(tensors)
        if self._on_host(tensors):
            return self._host.allreduce(tensors, opts or _torch.allreduce_options(dist.ReduceOp.SUM))
        return self._launch(calls.all_reduce(tensors, self._reduction(opts, tensors[0])), opts)

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> Any:
        """``allreduce`` of several tensors."""
        if self._on_host(tensors):
            return self._host.allreduce_coalesced(tensors, opts)
        return self._launch(calls.all_reduce(tensors, self._reduction(opts, tensors[0])), opts)

    def reduce(self, tensors: Tensors, opts: Any) -> Any:
        """The root's tensor becomes the reduction of all ranks'."""
        if self._on_host(tensors):
            return self._host.reduce(tensors, opts)
        is_root = opts.rootRank == self.rank()
        reduction = self._reduction(opts, tensors[0])
        return self._launch(calls.reduce(tensors[0], opts.rootRank, reduction, is_root=is_root), opts)

    def reduce_scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any = None) -> Any:
        """Each output receives this rank's part of the reduction of a list of one tensor for every rank."""
        if self._on_host(outputs):
            return self._host.reduce_scatter(outputs, inputs, opts or _torch.reduce_scatter_options(dist.ReduceOp.SUM))
        works = []
        for output, parts in zip(_listed(outputs), inputs, strict=True):
            group_checks.check_same(output, [parts[self.rank()]], parts)
            call = calls.reduce_scatter_list(output, parts, self._reduction(opts, output), self.rank())
            works.append(self._launch(call, opts))
        return works[0] if len(works) == 1 else ManyWorks(works)

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Any:
        """The output (n) receives this rank's part of the reduction of the input (world x n)."""
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Any:
        """``reduce_scatter_single`` of several tensors."""
        if self._on_host(outputs):
            opts = opts or _torch.reduce_scatter_options(dist.ReduceOp.SUM)
            return self._host.reduce_scatter_tensor_coalesced(outputs, inputs, opts)
        for output, input in zip(outputs, inputs, strict=True):
            group_checks.check_parts("reduce_scatter", whole=input, part=output, size=self.size())
        return self._launch(calls.reduce_scatter(outputs, inputs, self._reduction(opts, outputs[0])), opts)

    # Movements

    def broadcast(self, tensors: Tensors, opts: Any) -> Any:
        """Every tensor becomes the root's."""
        if self._on_host(tensors):
            return self._host.broadcast(tensors, opts)
        tensor = tensors[opts.rootTensor]
        return self._launch(calls.broadcast(tensor, opts.rootRank, is_root=opts.rootRank == self.rank()), opts)

    def allgather(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> Any:
        """Each list receives one tensor of every rank."""
        inputs = _listed(inputs)
        if self._on_host(inputs):
            return self._host.allgather(outputs, inputs, opts or _torch.allgather_options())
        for parts, input in zip(outputs, inputs, strict=True):
            group_checks.check_list("all_gather", parts, self.size())
            group_checks.check_same(input, parts)
        return self._launch(calls.all_gather_lists(outputs, inputs), opts)

    def allgather_coalesced(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> Any:
        """``allgather`` of several tensors."""
        return self.allgather(outputs, inputs, opts)

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Any:
        """The output (world x n) receives every rank's input (n), in rank order."""
        return self.all_gather_single_coalesced([output], [input], opts)

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Any:
        """``all_gather_single`` of several tensors."""
        if self._on_host(inputs):
            return self._host.allgather_into_tensor_coalesced(outputs, inputs, opts or _torch.allgather_options())
        for output, input in zip(outputs, inputs, strict=True):
            group_checks.check_parts("all_gather", whole=output, part=input, size=self.size())
        return self._launch(calls.all_gather(outputs, inputs), opts)

    def gather(self, outputs: list[Tensors], inputs: Tensors, opts: Any) -> Any:
        """The root's list receives one tensor of every rank."""
        if self._on_host(inputs):
            return self._host.gather(outputs, inputs, opts)
        parts = outputs[0] if opts.rootRank == self.rank() else []
        group_checks.check_same(inputs[0], parts)
        return self._launch(calls.gather(parts, inputs[0], opts.rootRank), opts)

    def scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any) -> Any:
        """The output receives this rank's element of the root's list."""
        if self._on_host(outputs):
            return self._host.scatter(outputs, inputs, opts)
        parts = inputs[0] if opts.rootRank == self.rank() else []
        group_checks.check_same(outputs[0], parts)
        return self._launch(calls.scatter(outputs[0], parts, opts.rootRank), opts)

    def all_to_all_single(
        self, output: torch.Tensor, input: torch.Tensor, receives: list[int], sends: list[int], opts: Any = None
    ) -> Any:
        """Rows of the input go to each rank by ``sends`` (equal parts when empty); ``receives`` rows come from each."""
        if self._on_host([input]):
            return self._host.alltoall_base(output, input, receives, sends, opts or _torch.all_to_all_options())
        sizes = [
            group_checks.elements(tensor, rows, self.size()) for tensor, rows in ((output, receives), (input, sends))
        ]
        return self._launch(calls.all_to_all(output, input, *sizes), opts)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Any:
        """Tensor r of the inputs goes to rank r; tensor r of the outputs comes from it."""
        if self._on_host(inputs):
            return self._host.alltoall(outputs, inputs, opts or _torch.all_to_all_options())
        for tensors in (outputs, inputs):
            group_checks.check_list("all_to_all", tensors, self.size())
            group_checks.check_same(inputs[0], [], tensors)
        return self._launch(calls.all_to_all_lists(outputs, inputs), opts)

    # Pairs of ranks, and nobody's data

    def send(self, tensors: Tensors, to: int, tag: int = 0) -> Any:
        """Send to rank ``to`` of the group."""
        if self._on_host(tensors):
            return self._host.send(tensors, to, tag)
        memory = self._memory(tensors, [])
        return self._note(PairWork(pairs.send(self._wire, memory.inputs[0], to, tag), tensors[0], memory))

    def recv(self, tensors: Tensors, source: int, tag: int = 0) -> Any:
        """Receive from rank ``source`` of the group."""
        if self._on_host(tensors):
            return self._host.recv(tensors, source, tag)
        return self._receive(tensors, source, tag)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> Any:
        """Receive from any rank."""
        if self._on_host(tensors):
            return self._host.recv_anysource(tensors, tag)
        return self._receive(tensors, None, tag)

    def barrier(self, opts: Any = None) -> Any:
        """Every rank has called it, and its earlier collectives are done."""
        return self._launch(calls.barrier(), opts)

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
        return ManyWorks(works)

    # Inner parts

    def _launch(self, call: calls.Call, opts: Any = None) -> Any:
        memory = self._memory(call.inputs, call.outputs, in_place=call.in_place)
        gloo, signature, run, publish = self._wire, call.signature, call.run, memory.publish
        inputs, outputs = memory.inputs, memory.outputs

        def execute() -> None:
            compare(gloo, signature)
            run(gloo, inputs, outputs)
            publish()

        job = Job(execute)
        if isinstance(memory, Late):
            self._late.append((job, memory))
        # Calls from C++ do not say whether they wait, and count as asynchronous.
        waits = self._coalescing is None and not getattr(opts, "asyncOp", True)
        (self._queue.run if waits else self._queue.submit)(job)
        return self._note(SimWork(job, call.outputs, memory, call.inputs))

    def _receive(self, tensors: Tensors, source: int | None, tag: int) -> Any:
        memory = self._memory([], tensors)
        publish, view = memory.publish, memory.outputs[0]
        receipt = pairs.Receipt(self._wire, source, tag)

        def execute() -> None:
            receipt.take(view)
            publish()

        job = Job(execute)
        line = self._lines.setdefault((source, tag), CommunicationQueue())
        line.submit(job)
        return self._note(SimWork(job, tensors, memory, source=receipt))

    def _memory(
        self, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], *, in_place: bool = False
    ) -> Direct | Late:
        tensors = [*inputs, *outputs]
        for tensor in tensors:
            if tensor.device.type != self._device_type:
                raise ValueError(f"a collective of tensors on {self._device_type} was given one on {tensor.device}")
            if not tensor.is_contiguous():
                raise ValueError("Tensors must be contiguous")
        if not tensors or not faults.is_late():
            return Direct(inputs, outputs)
        self._late = [(job, memory) for job, memory in self._late if not memory.arrived]
        earlier = [job for job, memory in self._late if memory.writes_to(tensors)]
        for job in earlier:  # the communication stream runs in order, whoever has waited or not
            job.settle()
        stream = self._stream(tensors[0].device)
        return Late(inputs, outputs, stream, in_place=in_place, behind=bool(earlier))

    def _stream(self, place: torch.device) -> torch.Stream:
        if place not in self._streams:
            self._streams[place] = torch.Stream(device=place)
        return self._streams[place]

    def _note(self, work: Any) -> Any:
        if self._coalescing is not None:
            self._coalescing.append(work)
        return work

    def _on_host(self, tensors: Any) -> bool:
        first = tensors if isinstance(tensors, torch.Tensor) else tensors[0]
        return first.device.type == "cpu"

    def _reduction(self, opts: Any, tensor: torch.Tensor) -> Any:
        operation = dist.ReduceOp.SUM if opts is None else opts.reduceOp
        return reduction_of(operation, tensor.dtype, self.size())


def _close(queue: CommunicationQueue, lines: dict[Any, CommunicationQueue]) -> None:
    for each in (queue, *lines.values()):
        each.close()


def _listed(tensors: Any) -> Any:
    return [tensors] if isinstance(tensors, torch.Tensor) else tensors
