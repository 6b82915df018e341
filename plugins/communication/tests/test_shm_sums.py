"""Sums of narrow floats: fp32 accumulation in rank order, rounded once, for every bit pattern; the same every time."""

import pytest
import torch
import torch.distributed as dist
from shm_ranks import ACCUMULATED_IN, WORLDS, on_ranks, only_shm, plugin, reduced, same_bits, same_numbers

from polyscale_communication.numbers import reduction_of

NARROW = [torch.bfloat16, torch.float16]
SPECIAL = [
    0.0,
    -0.0,
    1.0,
    -1.0,
    1e-45,
    -1e-40,
    1.1754944e-38,
    3.4e38,
    -3.4e38,
    float("inf"),
    float("-inf"),
    float("nan"),
]

pytestmark = only_shm


def every_pattern(dtype, rank):
    """All 65,536 patterns of a narrow float, in an order of ``rank``'s own."""
    order = torch.randperm(2**16, generator=torch.Generator().manual_seed(rank))
    return order.to(torch.int32).sub(2**15).to(torch.int16).view(dtype)


def sums_of_every_pattern(dtype):
    rank, world = dist.get_rank(), dist.get_world_size()
    inputs = [every_pattern(dtype, each) for each in range(world)]
    wrong = []
    for operation in ("SUM", "AVG", "PRODUCT", "MAX", "MIN"):
        tensor = inputs[rank].clone()
        dist.all_reduce(tensor, getattr(dist.ReduceOp, operation))
        if not same_numbers(tensor, reduced(operation, inputs)):
            wrong.append((operation, unlike(tensor, reduced(operation, inputs), inputs)))
    return wrong


def unlike(found, right, inputs):
    """The first elements that differ: (index, found, right, inputs)."""
    where = ((found != right) & ~((found != found) & (right != right))).nonzero().flatten()[:3].tolist()
    return [(i, found[i].item(), right[i].item(), [each[i].item() for each in inputs]) for i in where]


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_narrow_floats_are_accumulated_in_fp32_and_rounded_once(world, dtype):
    assert on_ranks(world, sums_of_every_pattern, dtype) == [[]] * world


def special_sums(dtype):
    """All pairs of special values; with the sign of zero."""
    rank, world = dist.get_rank(), dist.get_world_size()
    special = torch.tensor(SPECIAL, dtype=torch.float64).to(dtype)
    grids = [special.repeat(len(SPECIAL)), special.repeat_interleave(len(SPECIAL))]
    inputs = [grids[each % 2] for each in range(world)]
    wrong = []
    for operation in ("SUM", "MAX", "MIN"):
        tensor, right = inputs[rank].clone(), reduced(operation, inputs)
        dist.all_reduce(tensor, getattr(dist.ReduceOp, operation))
        if not same_numbers(tensor, right):
            wrong.append((operation, unlike(tensor, right, inputs)))
        if operation == "SUM" and not torch.equal(tensor.signbit()[right == 0], right.signbit()[right == 0]):
            wrong.append((operation, "sign of zero"))
    return wrong


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, *NARROW], ids=str)
def test_infinities_nan_zeros_and_denormals(dtype):
    assert on_ranks(2, special_sums, dtype) == [[]] * 2


def kept_partial_sums():
    """1, 2^-8, ..., 2^-8: a bf16 partial sum would lose every addend."""
    tensor = torch.full((64,), 1.0 if dist.get_rank() == 0 else 2.0**-8, dtype=torch.bfloat16)
    whole = tensor.repeat(dist.get_world_size())
    part = torch.empty_like(tensor)
    plugin().reduce_scatter(part, whole).wait()
    plugin().all_reduce(tensor).wait()
    return tensor.float().unique().tolist(), part.float().unique().tolist()


def test_the_table_of_sums_is_true_for_bf16():
    assert plugin().sums["bf16"] == "fp32"
    assert plugin().sums["fp16"] == "fp32"
    for found in on_ranks(3, kept_partial_sums):
        assert found == ([1.0078125], [1.0078125])


def digests(rounds, staggered):
    """Results of the same reduction, ``rounds`` times, with ranks coming late in turn."""
    import time

    rank, world = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(rank)
    found = []
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        given = torch.randn(70_001, generator=generator, dtype=torch.float64).mul_(100).to(dtype)
        first = None
        for turn in range(rounds):
            if staggered and turn % world == rank:
                time.sleep(0.005)
            tensor = given.clone()
            dist.all_reduce(tensor)
            first = tensor if first is None else first
            found.append(same_bits(tensor, first))
        objects = [None] * world
        dist.all_gather_object(objects, first.double().sum().item())
        found.append(len(set(objects)) == 1)
    return all(found)


@pytest.mark.parametrize("world", WORLDS)
def test_sums_are_the_same_every_time_and_on_all_ranks(world):
    assert on_ranks(world, digests, 10, True) == [True] * world


def independent_of_place():
    """A reduce_scatter of the plugin and an all_reduce give each element the same sum, whatever lies beside it."""
    rank, world = dist.get_rank(), dist.get_world_size()
    wrong = []
    for dtype in (torch.float32, *NARROW):
        inputs = [torch.randn(4099 * world, generator=torch.Generator().manual_seed(r)).to(dtype) for r in range(world)]
        part, whole = torch.empty(4099, dtype=dtype), inputs[rank].clone()
        plugin().reduce_scatter(part, inputs[rank]).wait()
        dist.all_reduce(whole)
        if not same_bits(part, whole[rank * 4099 : (rank + 1) * 4099]):
            wrong.append(dtype)
        short = inputs[rank][1:2].clone()
        dist.all_reduce(short)
        if not same_bits(short, whole[1:2]):
            wrong.append((dtype, "one element"))
    return wrong


@pytest.mark.parametrize("world", WORLDS)
def test_a_sum_does_not_depend_on_the_collective_or_the_place(world):
    assert on_ranks(world, independent_of_place) == [[]] * world


def test_every_dtype_of_the_table_is_one_that_can_be_summed():
    table = plugin().sums
    assert {"fp32", "fp64", "bf16", "fp16"} <= set(table)
    assert all(not name.startswith("float8") for name in table)
    assert len(ACCUMULATED_IN) == 2


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64], ids=str)
def test_a_factor_of_integers_is_refused_with_what_is_valid(dtype):
    with pytest.raises(RuntimeError, match=r"premul_sum\) of u?int\d+: .* 0\.5 .*Valid: float16, .*complex128"):
        reduction_of(dist._make_nccl_premul_sum(0.5), dtype)
    assert reduction_of(dist._make_nccl_premul_sum(0.5), torch.bfloat16).factor == 0.5
