"""What ranks call differently is the same error on all of them, and the group goes on."""

import pytest
import torch
import torch.distributed as dist
from shm_ranks import WORLDS, meet, on_ranks, only_shm, plugin, raised

from polyscale._torch import all_gather, reduce_scatter
from polyscale.errors import PolyscaleError, RankError, UnsupportedError

pytestmark = only_shm


def last():
    return dist.get_rank() == dist.get_world_size() - 1


def other_op():
    dist.all_reduce(torch.ones(4)) if last() else dist.barrier()


def other_kind():
    broadcast = lambda: dist.broadcast(torch.ones(4), 0)  # noqa: E731
    dist.all_reduce(torch.ones(4)) if last() else broadcast()


def other_size():
    dist.all_reduce(torch.ones(3 + last()))


def other_large_size():
    dist.all_reduce(torch.ones(700_000 + last()))


def nothing_against_something():
    dist.all_reduce(torch.ones(int(last())))


def other_dtype():
    dist.all_reduce(torch.ones(2, dtype=torch.float64 if last() else torch.float32))


def other_dtype_of_the_same_size():
    dist.all_reduce(torch.ones(2, dtype=torch.int32 if last() else torch.float32))


def other_root():
    dist.broadcast(torch.ones(2), int(last()))


def other_reduction():
    dist.all_reduce(torch.ones(2), dist.ReduceOp.MAX if last() else dist.ReduceOp.SUM)


def other_gather():
    numel = 3 + last()
    all_gather(torch.empty(numel * dist.get_world_size()), torch.ones(numel), None, async_op=False)


def other_scatter():
    numel = 3 + last()
    reduce_scatter(torch.empty(numel), torch.ones(numel * dist.get_world_size()), None, async_op=False)


def other_rows():
    """The last rank expects a row less from everyone than it is sent."""
    world = dist.get_world_size()
    receives = [1 if last() else 2] * world
    sends = [2] * world
    dist.all_to_all_single(torch.empty(sum(receives)), torch.ones(sum(sends)), receives, sends)


CASES = {
    other_op: ("barrier", "all_reduce"),
    other_kind: ("broadcast", "all_reduce"),
    other_size: ("all_reduce", "3", "4"),
    other_large_size: ("all_reduce", "700000", "700001"),
    nothing_against_something: ("all_reduce", "0", "1"),
    other_dtype: ("all_reduce", "float32", "float64"),
    other_dtype_of_the_same_size: ("all_reduce", "float32", "int32"),
    other_root: ("broadcast", "root 0", "root 1"),
    other_reduction: ("all_reduce", "sum", "max"),
    other_gather: ("all_gather", "3", "4"),
    other_scatter: ("reduce_scatter",),
    other_rows: ("all_to_all",),
}


def mismatched(call):
    said = raised(call)
    tensor = torch.full((1000,), float(dist.get_rank()))
    dist.all_reduce(tensor)
    again = raised(call)
    dist.barrier()
    world = dist.get_world_size()
    return said, again, tensor.unique().tolist() == [world * (world - 1) / 2]


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("call", CASES, ids=lambda call: call.__name__)
def test_a_mismatch_is_the_same_error_everywhere_and_the_group_goes_on(call, world):
    found = on_ranks(world, mismatched, call)
    said = found[0][0]
    assert all(each[0] == said for each in found), found
    assert all(each[1] != "nothing was raised" and each[2] for each in found)
    for word in (*CASES[call], "rank 0", f"rank {world - 1}"):
        assert word in said, (word, said)


def mismatched_works():
    """A mismatch among many works under way fails its own work alone."""
    rank = dist.get_rank()
    tensors = [torch.full((100,), float(rank + 1)) for _ in range(6)]
    odd = torch.ones(5 + rank)
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors[:3]]
    wrong = dist.all_reduce(odd, async_op=True)
    works += [dist.all_reduce(tensor, async_op=True) for tensor in tensors[3:]]
    for work in works:
        work.wait()
    said = raised(wrong.wait)
    assert not wrong.is_success()
    assert odd.tolist() == [1.0] * (5 + rank)
    with pytest.raises(RankError) as caught:
        plugin().all_reduce(odd).wait()
    return said, str(caught.value), [tensor.unique().tolist() for tensor in tensors]


def test_a_mismatch_among_works_under_way_fails_alone():
    (one, told, sums), (two, _, _) = on_ranks(2, mismatched_works)
    assert one == two
    assert "all_reduce" in one and "5" in one and "6" in one
    assert told.startswith("all_reduce on rank 0")
    assert sums == [[3.0]] * 6


def mismatched_future():
    said = raised(dist.all_reduce(torch.ones(2 + dist.get_rank()), async_op=True).get_future().wait)
    dist.barrier()
    return said


def test_a_future_of_a_mismatch_holds_the_error():
    one, two = on_ranks(2, mismatched_future)
    assert "all_reduce" in one and "all_reduce" in two


def root(options, rank):
    options.rootRank = rank
    return options


def refusals():
    two, three = torch.zeros(2), torch.zeros(3)
    rank = dist.get_rank()
    said = []
    for call in (
        lambda: plugin().all_gather(three, two),
        lambda: plugin().reduce_scatter(two, three),
        lambda: plugin().all_gather(torch.zeros(4, dtype=torch.float64), two),
        lambda: plugin().all_to_all(three, three.clone()),
        lambda: plugin().all_reduce(torch.zeros(2, 2).t()[0]),
        lambda: plugin().all_reduce(two, op="avg"),
        lambda: plugin().broadcast(two, 7),
        lambda: plugin().send(two, rank),
    ):
        with pytest.raises(PolyscaleError) as caught:
            call()
        said.append(str(caught.value))
    for dtype in (torch.float8_e4m3fn, torch.complex64):
        with pytest.raises(UnsupportedError, match="over shm"):
            plugin().all_reduce(torch.zeros(2).to(dtype))
    for call in (
        lambda: all_gather(three, two, None, async_op=False),
        lambda: reduce_scatter(two, three, None, async_op=False),
        lambda: dist.all_gather([two, three], two),
        lambda: dist.all_to_all_single(three, three.clone()),
        lambda: dist.all_reduce(two, dist.ReduceOp.BAND),
        lambda: dist.all_reduce(torch.zeros(2).to(torch.float8_e5m2)),
        lambda: dist.group.WORLD.broadcast([two], root(dist.BroadcastOptions(), 2)).wait(),
        lambda: dist.group.WORLD.reduce([two], root(dist.ReduceOptions(), -1)).wait(),
    ):
        with pytest.raises((RuntimeError, ValueError, TypeError)) as caught:
            call()
        said.append(str(caught.value))
    meet("refused")
    dist.all_reduce(two)
    return said, two.tolist()


def test_bad_calls_are_refused_on_this_rank_before_anything_is_sent():
    (first, summed), (second, _) = on_ranks(2, refusals)
    assert summed == [0.0, 0.0]
    assert "needs 4" in first[0]
    assert "needs 4" in first[1]
    assert "torch.float64" in first[2]
    assert "multiple of 2" in first[3]
    assert "not contiguous" in first[4]
    assert "Valid: sum, max, min" in first[5]
    assert "holds ranks 0, 1" in first[6]
    assert "itself" in first[7]
    assert len(second) == len(first)
    assert all(len(text) > 20 for text in first), first
