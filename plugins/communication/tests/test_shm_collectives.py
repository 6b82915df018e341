"""Every collective of c10d against plain torch on the inputs of all ranks, for every dtype and awkward sizes."""

import itertools

import pytest
import torch
import torch.distributed as dist
from shm_operations import everyone, gather_into_one, move, reduce, scatter_from_one
from shm_ranks import (
    BACKEND,
    INTEGER,
    MOVED_ONLY,
    REAL,
    REDUCED,
    WORLDS,
    on_ranks,
    only_shm,
    plugin,
    reduced,
    same_bits,
    same_numbers,
    values,
)

from polyscale._torch import all_gather

SMALL = (0, 1, 7, 259)
LARGE = (2**16 - 1, 2**16, 2**16 + 1)
MOVED_BY_GLOO = (*REDUCED, torch.bool)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("dtypes", [REAL, INTEGER, MOVED_ONLY], ids=["real", "integer", "other"])
def test_movements_carry_every_bit(world, dtypes):
    movable = [dtype for dtype in dtypes if BACKEND != "gloo" or dtype in MOVED_BY_GLOO]
    assert on_ranks(world, move, movable, SMALL) == [[]] * world


@pytest.mark.parametrize("world", WORLDS)
def test_movements_carry_every_bit_of_tensors_about_64_ki(world):
    assert on_ranks(world, move, [torch.uint8, torch.bfloat16, torch.float32], LARGE) == [[]] * world


@pytest.mark.parametrize("world", WORLDS)
def test_reductions_of_real_numbers_are_the_arithmetic(world):
    assert on_ranks(world, reduce, REAL, SMALL, ["SUM", "AVG", "PRODUCT", "MIN", "MAX"]) == [[]] * world


@pytest.mark.parametrize("world", WORLDS)
def test_reductions_of_integers_are_the_arithmetic(world):
    operations = ["SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"]
    assert on_ranks(world, reduce, INTEGER, SMALL, operations) == [[]] * world


@pytest.mark.long
@pytest.mark.parametrize("world", WORLDS)
def test_reductions_of_tensors_about_64_ki(world):
    dtypes = [torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.uint8]
    assert on_ranks(world, reduce, dtypes, LARGE, ["SUM", "MAX"]) == [[]] * world


@pytest.mark.long
@pytest.mark.parametrize("world", [2, 4])
def test_tensors_of_many_megabytes(world):
    """Larger than any memory that is set apart for staging; an odd number of bytes too."""
    sizes = (3 * 2**18 + 3,)
    assert on_ranks(world, move, [torch.float32], sizes, timeout=120) == [[]] * world
    assert on_ranks(world, move, [torch.uint8], (3 * 2**20 + 3,), timeout=120) == [[]] * world
    assert on_ranks(world, reduce, [torch.float32], sizes, ["SUM"], timeout=120) == [[]] * world
    assert on_ranks(world, reduce, [torch.bfloat16], (3 * 2**19 + 1,), ["AVG"], timeout=120) == [[]] * world


def one_large_of_each():
    """The two that an engine lives on: one call of each, for 12 MB."""
    wrong = []
    for found, right in gather_into_one(torch.float32, 3 * 2**19 + 1):
        wrong += [] if same_bits(found, right) else ["all_gather"]
    for found, right in scatter_from_one(torch.float32, 3 * 2**19 + 1, "SUM"):
        wrong += [] if same_numbers(found, right) else ["reduce_scatter"]
    return wrong


def test_a_tensor_larger_than_the_staging_memory():
    assert on_ranks(2, one_large_of_each) == [[]] * 2


def through_the_plugin(dtype, numel):
    """The methods of polyscale's protocol, with a size that is checked against the same oracle."""
    communication = plugin()
    rank, world = dist.get_rank(), dist.get_world_size()
    inputs = everyone(dtype, numel * world, values)
    mine = inputs[rank]
    gathered, part, swapped = mine.new_empty(numel * world * world), mine.new_empty(numel), torch.empty_like(mine)
    received = torch.empty_like(mine)
    communication.all_gather(gathered, mine).wait()
    communication.reduce_scatter(part, mine).wait_host()
    communication.all_to_all(swapped, mine).wait()
    parts = slice(rank * numel, (rank + 1) * numel)
    found = [
        same_numbers(gathered, torch.cat(inputs)),
        same_numbers(part, reduced("SUM", inputs)[parts]),
        same_numbers(swapped, torch.cat([each[parts] for each in inputs])),
    ]
    for op in ("sum", "min", "max"):
        tensor = mine.clone()
        communication.all_reduce(tensor, op=op).wait()
        found.append(same_numbers(tensor, reduced(op.upper(), inputs)))
    sent = mine.clone()
    communication.broadcast(sent, world - 1).wait()
    works = [communication.send(mine, (rank + 1) % world), communication.recv(received, (rank - 1) % world)]
    for work in works:
        work.wait()
    communication.barrier().wait_host()
    return [*found, same_numbers(sent, inputs[-1]), same_numbers(received, inputs[rank - 1])]


def all_through_the_plugin():
    cases = itertools.product([torch.float32, torch.bfloat16, torch.int64], [0, 5, 3001])
    return [(*case, found) for case in cases for found in [through_the_plugin(*case)] if found != [True] * 8]


@pytest.mark.parametrize("world", WORLDS)
def test_the_methods_of_the_plugin(world):
    assert on_ranks(world, all_through_the_plugin) == [[]] * world


def shapes_and_lists():
    """Tensors of two and of no dimensions, several at once, objects, and what coalesces."""
    from torch.distributed.distributed_c10d import _coalescing_manager

    rank, world = dist.get_rank(), dist.get_world_size()
    scalar = torch.tensor(float(rank + 1))
    dist.all_reduce(scalar)
    stacked = torch.empty(world, 2, 3)
    all_gather(stacked.view(world * 2, 3), torch.full((2, 3), float(rank)), None, async_op=False)
    tensors = [torch.full((n,), float(rank + 1)) for n in (1, 2, 3)]
    with _coalescing_manager(async_ops=True) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor)
    manager.wait()
    objects = [None] * world
    dist.all_gather_object(objects, {"rank": rank})
    told = [None, "told"] if rank == 1 else [None, None]
    dist.broadcast_object_list(told, 1)
    given = [None]
    dist.scatter_object_list(given, [f"for {to}" for to in range(world)] if rank == 0 else None, 0)
    dist.barrier()
    right = world * (world + 1) / 2
    assert scalar.item() == right
    assert stacked[:, 0, 0].tolist() == [float(each) for each in range(world)]
    assert all((tensor == right).all() for tensor in tensors)
    assert objects == [{"rank": each} for each in range(world)]
    return told[1], given[0]


@pytest.mark.parametrize("world", WORLDS)
def test_shapes_objects_and_several_tensors(world):
    assert on_ranks(world, shapes_and_lists) == [("told", f"for {rank}") for rank in range(world)]


def strided():
    """Tensors with gaps are moved rightly or refused in words, and what lies in the gaps is left alone."""
    rank, world = dist.get_rank(), dist.get_world_size()
    whole = torch.full((4, 2), float(rank + 1))
    try:
        dist.all_reduce(whole[:, 0])
    except (RuntimeError, ValueError) as error:
        assert "contiguous" in str(error) or "dense" in str(error), error
    else:
        assert (whole[:, 0] == world * (world + 1) / 2).all()
    assert (whole[:, 1] == rank + 1).all()
    dist.barrier()
    return "well"


@only_shm
def test_a_tensor_with_gaps():
    assert on_ranks(2, strided) == ["well"] * 2
