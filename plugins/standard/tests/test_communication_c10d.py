"""The c10d communication plugins: every collective against its definition, refusals, sums of narrow dtypes."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from polyscale.discovery import load
from polyscale.errors import PolyscaleError, RankError, UnsupportedError
from polyscale.hooks import PluginContext
from polyscale.testing import ranks
from polyscale.testing.alone import alone

NAMES = ("gloo", "nccl", "xccl", "hccl", "tccl", "mpi")


@pytest.mark.parametrize("name", NAMES)
def test_availability_is_that_of_this_torch(name):
    made = load("communication", name)
    assert made.name == name
    assert made.is_available() == dist.is_backend_available(name)
    assert bool(made.why_unavailable()) != made.is_available()
    assert made.sums["fp32"] == "fp32"
    assert "float8_e4m3fn" not in made.sums


def test_backend_string_has_one_for_host_tensors():
    gloo, nccl = load("communication", "gloo"), load("communication", "nccl")
    assert gloo.backend("cpu") == "gloo"
    (device,) = dist.Backend.backend_capability["nccl"]
    assert nccl.backend(device) == f"cpu:gloo,{device}:nccl"
    assert gloo.backend(device) == f"cpu:gloo,{device}:gloo"
    for made, wrong in ((nccl, "cpu"), (gloo, "meta")):
        with pytest.raises(UnsupportedError, match=repr(wrong)) as caught:
            made.backend(wrong)
        assert "auto" not in caught.value.fix  # which may be what has chosen it
        assert "communications" in caught.value.fix


def without_a_group():
    dist.destroy_process_group()
    try:
        load("communication", "gloo").barrier()
    except PolyscaleError as error:
        return str(error)
    return "no error"


def test_without_a_group_it_says_so():
    assert "polyscale.initialize" in alone(without_a_group)


def collectives(dtype):
    gloo = load("communication", "gloo", PluginContext("gloo"))
    rank, world = dist.get_rank(), dist.get_world_size()
    buffer = gloo.allocate(6, dtype=dtype, device=torch.device("cpu"))
    assert (buffer.shape, buffer.dtype) == ((6,), dtype)
    mine = torch.arange(3).add(3 * rank).to(dtype)
    gloo.all_gather(buffer, mine).wait()
    part = torch.empty(3, dtype=dtype)
    gloo.reduce_scatter(part, buffer.clone()).wait_host()
    summed, largest, least = mine.clone(), mine.clone(), mine.clone()
    for tensor, op in ((summed, "sum"), (largest, "max"), (least, "min")):
        gloo.all_reduce(tensor, op=op).wait()
    swapped = torch.empty(4, dtype=dtype)
    gloo.all_to_all(swapped, torch.arange(4).add(4 * rank).to(dtype)).wait()
    sent = mine.clone()
    gloo.broadcast(sent, 1).wait()
    peer = torch.empty(3, dtype=dtype)
    works = [gloo.send(mine, 1 - rank), gloo.recv(peer, 1 - rank)]
    for work in works:
        work.wait()
    gloo.barrier().wait_host()
    assert world == 2
    return [tensor.double() for tensor in (buffer, part, summed, largest, least, swapped, sent, peer)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64], ids=str)
def test_collectives_do_what_they_are_defined_to_do(dtype):
    for rank, found in enumerate(ranks(2).run(collectives, dtype)):
        first, second = [0, 1, 2], [3, 4, 5]
        part = [[0, 2, 4], [6, 8, 10]][rank]
        swapped = [[0, 1, 4, 5], [2, 3, 6, 7]][rank]
        peer = [second, first][rank]
        expected = [first + second, part, [3, 5, 7], second, first, swapped, second, peer]
        assert [tensor.tolist() for tensor in found] == expected


def sub_groups():
    gloo = load("communication", "gloo")
    rank = dist.get_rank()
    groups = [dist.new_group([0]), dist.new_group([1])]
    tensor = torch.tensor([float(rank + 1)])
    gloo.all_reduce(tensor, groups[rank]).wait()
    with pytest.raises(PolyscaleError, match="not a member"):
        gloo.all_reduce(tensor, groups[1 - rank])
    with pytest.raises(PolyscaleError, match=f"holds ranks {rank}"):
        gloo.broadcast(tensor, 1 - rank, groups[rank])
    return tensor.item()


def test_groups_limit_a_collective_to_their_members():
    assert ranks(2).run(sub_groups) == [1.0, 2.0]


def eight_bit_floats():
    gloo = load("communication", "gloo")
    mine = torch.tensor([1.0, 0.5 + dist.get_rank()]).to(torch.float8_e4m3fn)
    gathered = torch.empty(4, dtype=mine.dtype)
    gloo.all_gather(gathered, mine).wait()
    received = mine.clone()
    gloo.broadcast(received, 1).wait()
    with pytest.raises(UnsupportedError, match="float8_e4m3fn over gloo"):
        gloo.all_reduce(mine)
    with pytest.raises(UnsupportedError, match="float8_e4m3fn over gloo"):
        gloo.reduce_scatter(mine[:1], mine)
    return gathered.float().tolist(), received.float().tolist()


def test_eight_bit_floats_are_moved_and_never_summed():
    assert ranks(2).run(eight_bit_floats) == [([1.0, 0.5, 1.0, 1.5], [1.0, 1.5])] * 2


def narrow_sums():
    gloo = load("communication", "gloo")
    values = [torch.full((64,), 1.0 if dist.get_rank() == 0 else 2.0**-8, dtype=torch.bfloat16)]
    for tensor in values:
        gloo.all_reduce(tensor).wait()
    return values[0].float().unique().tolist()


def test_the_table_of_sums_is_true_for_bf16():
    """1 + 2^-8 + 2^-8 over three ranks: 1.0078125 with fp32 accumulation; bf16 rounds each partial sum to even."""
    assert load("communication", "gloo").sums["bf16"] == "bf16"
    for found in ranks(3).run(narrow_sums):
        assert found != [1.0078125]


def refusals():
    gloo = load("communication", "gloo")
    rank = dist.get_rank()
    two, three = torch.zeros(2), torch.zeros(3)
    found = []
    for call in (
        lambda: gloo.all_gather(three, two),
        lambda: gloo.reduce_scatter(two, three),
        lambda: gloo.all_gather(torch.zeros(4, dtype=torch.float64), two),
        lambda: gloo.all_to_all(three, three.clone()),
        lambda: gloo.all_reduce(torch.zeros(2, 2).t()[0]),
        lambda: gloo.all_reduce(two, op="avg"),
        lambda: gloo.broadcast(two, 7),
        lambda: gloo.send(two, rank),
    ):
        with pytest.raises(PolyscaleError) as caught:
            call()
        found.append(str(caught.value))
    return found


def test_bad_calls_are_refused_on_this_rank_before_anything_is_sent():
    first, second = ranks(2).run(refusals)
    assert "needs 4" in first[0]
    assert "needs 4" in first[1]
    assert "torch.float64" in first[2]
    assert "multiple of 2" in first[3]
    assert "not contiguous" in first[4]
    assert "Valid: sum, max, min" in first[5]
    assert "holds ranks 0, 1" in first[6]
    assert "itself" in first[7]
    assert len(second) == len(first)


def lonely():
    gloo = load("communication", "gloo")
    group = dist.new_group(timeout=timedelta(seconds=2))
    if dist.get_rank() == 1:
        return "left"
    with pytest.raises(RankError) as caught:
        gloo.all_reduce(torch.zeros(1), group).wait()
    return str(caught.value)


def test_a_rank_that_does_not_come_is_an_error_not_a_wait_for_ever():
    said, left = ranks(2).run(lonely)
    assert left == "left"
    assert said.startswith("all_reduce on rank 0")


def held():
    gloo = load("communication", "gloo")
    world = dist.get_world_size()
    output = torch.empty(1000 * world)
    work = gloo.all_gather(output, torch.full((1000,), float(dist.get_rank())))
    for _ in range(20):
        torch.full((1000,), -1.0)
    work.wait()
    work.wait()
    return output.view(world, 1000)[:, 0].tolist()


def test_work_holds_its_tensors_and_may_be_waited_for_twice():
    assert ranks(2).run(held) == [[0.0, 1.0]] * 2
