"""Collectives of c10d beside what plain torch makes of the inputs of all ranks: pairs of found and right tensors."""

from __future__ import annotations

import itertools

import torch
import torch.distributed as dist
from shm_ranks import BACKEND, bits, reduced, same_bits, same_numbers, values

from polyscale._torch import all_gather


def everyone(dtype, numel, make=bits, seed=0):
    return [make(dtype, numel, rank, seed) for rank in range(dist.get_world_size())]


def gather_into_one(dtype, numel):
    inputs = everyone(dtype, numel)
    output = bits(dtype, numel * len(inputs), 99)
    all_gather(output, inputs[dist.get_rank()], None, async_op=False)
    yield output, torch.cat(inputs)


def gather_into_a_list(dtype, numel):
    inputs = everyone(dtype, numel)
    outputs = [bits(dtype, numel, 99) for _ in inputs]
    dist.all_gather(outputs, inputs[dist.get_rank()])
    yield from zip(outputs, inputs, strict=True)


def broadcast_of_each(dtype, numel):
    for root, right in enumerate(everyone(dtype, numel)):
        tensor = right.clone() if dist.get_rank() == root else bits(dtype, numel, 99)
        dist.broadcast(tensor, root)
        yield tensor, right


def gather_at_each(dtype, numel):
    inputs = everyone(dtype, numel)
    for root in range(len(inputs)):
        here = dist.get_rank() == root
        outputs = [bits(dtype, numel, 99) for _ in inputs] if here else None
        dist.gather(inputs[dist.get_rank()], outputs, dst=root)
        yield from zip(outputs, inputs, strict=True) if here else ()


def scatter_from_each(dtype, numel):
    for root in range(dist.get_world_size()):
        parts = everyone(dtype, numel, seed=root)
        output = bits(dtype, numel, 99)
        dist.scatter(output, parts if dist.get_rank() == root else None, src=root)
        yield output, parts[dist.get_rank()]


def parts_to_all(dtype, numel):
    rank, world = dist.get_rank(), dist.get_world_size()
    inputs = everyone(dtype, numel * world)
    output = bits(dtype, numel * world, 99)
    dist.all_to_all_single(output, inputs[rank])
    yield output, torch.cat([each[rank * numel : (rank + 1) * numel] for each in inputs])


def uneven_parts_to_all(dtype, numel):
    """Rank s sends numel // (s + 1) + d elements to rank d."""
    rank, world = dist.get_rank(), dist.get_world_size()
    sizes = [[numel // (source + 1) + to for to in range(world)] for source in range(world)]
    inputs = [bits(dtype, sum(sizes[source]), source) for source in range(world)]
    receives = [sizes[source][rank] for source in range(world)]
    output = bits(dtype, sum(receives), 99)
    dist.all_to_all_single(output, inputs[rank], receives, sizes[rank])
    right = [each.split(sizes[source])[rank] for source, each in enumerate(inputs)]
    yield output, torch.cat(right)


def lists_to_all(dtype, numel):
    rank, world = dist.get_rank(), dist.get_world_size()
    more = BACKEND == "shm"  # gloo moves equal parts alone
    lists = [[bits(dtype, numel + more * to, source, to) for to in range(world)] for source in range(world)]
    outputs = [bits(dtype, numel + more * rank, 99) for _ in range(world)]
    dist.all_to_all(outputs, lists[rank])
    for source in range(world):
        yield outputs[source], lists[source][rank]


def around_the_ring(dtype, numel):
    rank, world = dist.get_rank(), dist.get_world_size()
    received, sent = bits(dtype, numel, 99), bits(dtype, numel, rank)
    work = dist.isend(sent, (rank + 1) % world)
    dist.recv(received, (rank - 1) % world)
    work.wait()
    yield received, bits(dtype, numel, (rank - 1) % world)


MOVEMENTS = [
    gather_into_one,
    gather_into_a_list,
    broadcast_of_each,
    gather_at_each,
    scatter_from_each,
    parts_to_all,
    uneven_parts_to_all,
    lists_to_all,
    around_the_ring,
]


def reduce_on_all(dtype, numel, operation):
    inputs = everyone(dtype, numel, values)
    tensor = inputs[dist.get_rank()].clone()
    dist.all_reduce(tensor, getattr(dist.ReduceOp, operation))
    yield tensor, reduced(operation, inputs)


def reduce_at_each(dtype, numel, operation):
    for root in range(dist.get_world_size()):
        inputs = everyone(dtype, numel, values)
        tensor = inputs[dist.get_rank()].clone()
        dist.reduce(tensor, root, getattr(dist.ReduceOp, operation))
        if dist.get_rank() == root:
            yield tensor, reduced(operation, inputs)


def scatter_from_one(dtype, numel, operation):
    rank, world = dist.get_rank(), dist.get_world_size()
    inputs = everyone(dtype, numel * world, values)
    output = values(dtype, numel, 99)
    kept = inputs[rank].clone()
    call = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    call(output, inputs[rank], getattr(dist.ReduceOp, operation))
    yield output, reduced(operation, inputs)[rank * numel : (rank + 1) * numel]
    yield inputs[rank], kept


def scatter_from_a_list(dtype, numel, operation):
    rank, world = dist.get_rank(), dist.get_world_size()
    lists = [[values(dtype, numel, source, part) for part in range(world)] for source in range(world)]
    output = values(dtype, numel, 99)
    dist.reduce_scatter(output, lists[rank], getattr(dist.ReduceOp, operation))
    yield output, reduced(operation, [parts[rank] for parts in lists])


REDUCTIONS = [reduce_on_all, reduce_at_each, scatter_from_one, scatter_from_a_list]


def move(dtypes, sizes):
    """All movements at all sizes; what came out wrong."""
    wrong = []
    for dtype, numel, movement in itertools.product(dtypes, sizes, MOVEMENTS):
        for index, (found, right) in enumerate(movement(dtype, numel)):
            if not same_bits(found, right):
                wrong.append((movement.__name__, dtype, numel, index))
    return wrong


def reduce(dtypes, sizes, operations):
    """All reductions by all operations at all sizes; what came out wrong."""
    wrong = []
    for dtype, numel, operation, reduction in itertools.product(dtypes, sizes, operations, REDUCTIONS):
        for index, (found, right) in enumerate(reduction(dtype, numel, operation)):
            if not same_numbers(found, right):
                wrong.append((reduction.__name__, operation, dtype, numel, index))
    return wrong
