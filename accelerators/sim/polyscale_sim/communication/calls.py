"""What each collective reads, writes and does, on host views of the device's tensors.

Notable: nothing here knows a device. Movements of dtypes that gloo lacks (8-bit floats, int16, complex) go as bytes;
sizes are in elements of flat tensors, so shapes do not matter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from polyscale_sim.communication.reductions import REDUCIBLE, Reduction
from polyscale_sim.communication.signature import Signature
from polyscale_standard.communication import _torch

Tensors = list[torch.Tensor]


@dataclass
class Call:
    """One collective of one rank.

    Attributes:
        signature: what ranks compare.
        inputs: tensors that are only read.
        outputs: tensors that are written.
        run: ``run(gloo, inputs, outputs)`` with host tensors in the place of the device's.
        in_place: outputs are read first.
    """

    signature: Signature
    inputs: Tensors
    outputs: Tensors
    run: Callable[[Any, Tensors, Tensors], None] = field(repr=False)
    in_place: bool = False


def flat(view: torch.Tensor) -> torch.Tensor:
    """The elements as a 1-D tensor of a dtype that gloo moves; the same memory."""
    line = view.reshape(-1)
    return line if line.dtype in REDUCIBLE and line.dtype != torch.bool else line.view(torch.uint8)


def _numels(tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
    return tuple(tensor.numel() for tensor in tensors)


def all_reduce(tensors: Tensors, reduction: Reduction) -> Call:
    """Every tensor becomes the reduction of all ranks'."""

    def run(gloo: Any, _inputs: Tensors, outputs: Tensors) -> None:
        for view in outputs:
            reduction.start(view, own=True)
            gloo.allreduce([view], _torch.allreduce_options(reduction.gloo)).wait()
            reduction.finish(view)

    signature = Signature("all_reduce", _numels(tensors), tensors[0].dtype, reduction.name)
    return Call(signature, [], tensors, run, in_place=True)


def reduce(tensor: torch.Tensor, root: int, reduction: Reduction, *, is_root: bool) -> Call:
    """The root's tensor becomes the reduction; the others keep theirs (gloo would use it as a scratch pad)."""

    def run(gloo: Any, inputs: Tensors, outputs: Tensors) -> None:
        view = reduction.start(outputs[0], own=True) if is_root else reduction.start(inputs[0].clone(), own=True)
        gloo.reduce([view], _torch.reduce_options(reduction.gloo, root)).wait()
        if is_root:
            reduction.finish(view)

    signature = Signature("reduce", _numels([tensor]), tensor.dtype, reduction.name, root)
    return Call(signature, [] if is_root else [tensor], [tensor] if is_root else [], run, in_place=is_root)


def broadcast(tensor: torch.Tensor, root: int, *, is_root: bool) -> Call:
    """Every tensor becomes the root's."""

    def run(gloo: Any, inputs: Tensors, outputs: Tensors) -> None:
        gloo.broadcast([flat((inputs or outputs)[0])], _torch.broadcast_options(root)).wait()

    signature = Signature("broadcast", _numels([tensor]), tensor.dtype, root=root)
    return Call(signature, [tensor] if is_root else [], [] if is_root else [tensor], run)


def all_gather(outputs: Tensors, inputs: Tensors) -> Call:
    """Each output (world x n) receives every rank's input (n)."""

    def run(gloo: Any, inputs: Tensors, outputs: Tensors) -> None:
        for output, input in zip(outputs, inputs, strict=True):
            gloo._allgather_base(flat(output), flat(input)).wait()

    return Call(Signature("all_gather", _numels(inputs), inputs[0].dtype), inputs, outputs, run)


def all_gather_lists(lists: list[Tensors], inputs: Tensors) -> Call:
    """Each list receives one tensor of every rank."""
    lengths = [len(each) for each in lists]

    def run(gloo: Any, inputs: Tensors, outputs: Tensors) -> None:
        left = iter(outputs)
        for length, input in zip(lengths, inputs, strict=True):
            parts = [flat(next(left)) for _ in range(length)]
            gloo.allgather([parts], [flat(input)]).wait()

    signature = Signature("all_gather", _numels(inputs), inputs[0].dtype)
    return Call(signature, inputs, [tensor for each in lists for tensor in each], run)


def reduce_scatter(outputs: Tensors, inputs: Tensors, reduction: Reduction) -> Call:
    """Each output (n) receives this rank's part of the reduction of the inputs (world x n)."""

    def run(gloo: Any, inputs: Tensors, outputs: Tensors) -> None:
        for output, input in zip(outputs, inputs, strict=True):
            given = reduction.start(input.reshape(-1), own=False)
            gloo._reduce_scatter_base(output.view(-1), given, _torch.reduce_scatter_options(reduction.gloo)).wait()
            reduction.finish(output)

    signature = Signature("reduce_scatter", _numels(outputs), outputs[0].dtype, reduction.name)
    return Call(signature, inputs, outputs, run)


def reduce_scatter_list(output: torch.Tensor, inputs: Tensors, reduction: Reduction, rank: int) -> Call:
    """The output receives the reduction of every rank's ``inputs[rank]``; parts may differ in size."""
    numels = list(_numels(inputs))

    def run(gloo: Any, inputs: Tensors, outputs: Tensors) -> None:
        whole = reduction.start(torch.cat([input.reshape(-1) for input in inputs]), own=True)
        gloo.allreduce([whole], _torch.allreduce_options(reduction.gloo)).wait()
        part = torch.split(whole, numels)[rank].clone()
        reduction.finish(part)
        outputs[0].view(-1).copy_(part)

    signature = Signature("reduce_scatter", tuple(numels), output.dtype, reduction.name)
    return Call(signature, inputs, [output], run)


def gather(outputs: Tensors, input: torch.Tensor, root: int) -> Call:
    """The root's outputs receive one tensor of every rank."""

    def run(gloo: Any, inputs: Tensors, outputs: Tensors) -> None:
        lists = [[flat(view) for view in outputs]] if outputs else []
        gloo.gather(lists, [flat(inputs[0])], _torch.gather_options(root)).wait()

    return Call(Signature("gather", _numels([input]), input.dtype, root=root), [input], outputs, run)


def scatter(output: torch.Tensor, inputs: Tensors, root: int) -> Call:
    """The output receives this rank's element of the root's inputs."""

    def run(gloo: Any, inputs: Tensors, outputs: Tensors) -> None:
        lists = [[flat(view) for view in inputs]] if inputs else []
        gloo.scatter([flat(outputs[0])], lists, _torch.scatter_options(root)).wait()

    return Call(Signature("scatter", _numels([output]), output.dtype, root=root), inputs, [output], run)


def all_to_all(output: torch.Tensor, input: torch.Tensor, receives: list[int], sends: list[int]) -> Call:
    """Piece r of the input goes to rank r; the output holds one piece of each rank. Pieces are counted in elements."""

    def run(gloo: Any, inputs: Tensors, outputs: Tensors) -> None:
        target, source = flat(outputs[0]), flat(inputs[0])
        times = inputs[0].element_size() // source.element_size()
        gloo.alltoall_base(target, source, [n * times for n in receives], [n * times for n in sends]).wait()

    signature = Signature("all_to_all", dtype=input.dtype, sends=tuple(sends), receives=tuple(receives))
    return Call(signature, [input], [output], run)


def all_to_all_lists(outputs: Tensors, inputs: Tensors) -> Call:
    """Tensor r of the inputs goes to rank r; tensor r of the outputs comes from it."""
    receives, sends = list(_numels(outputs)), list(_numels(inputs))

    def run(gloo: Any, inputs: Tensors, outputs: Tensors) -> None:
        source = torch.cat([flat(view) for view in inputs])
        times = inputs[0].element_size() // source.element_size()
        counts = [n * times for n in receives]
        target = torch.empty(sum(counts), dtype=source.dtype)
        gloo.alltoall_base(target, source, counts, [n * times for n in sends]).wait()
        for view, part in zip(outputs, torch.split(target, counts), strict=True):
            flat(view).copy_(part)

    signature = Signature("all_to_all", dtype=inputs[0].dtype, sends=tuple(sends), receives=tuple(receives))
    return Call(signature, inputs, outputs, run)


def barrier() -> Call:
    """Nothing but that every rank has called it."""

    def run(gloo: Any, _inputs: Tensors, _outputs: Tensors) -> None:
        gloo.barrier().wait()

    return Call(Signature("barrier"), [], [], run)
