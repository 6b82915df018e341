"""Groups beside the default one: parts, overlaps, slices of meshes, threads, groups that come and go."""

import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from shm_ranks import WORLDS, meet, on_ranks, only_shm, plugin

from polyscale._torch import all_gather
from polyscale.errors import PolyscaleError


def parts_of_the_world():
    """Every pair of ranks is a group, as are single ranks and everyone backwards."""
    rank, world = dist.get_rank(), dist.get_world_size()
    pairs = [(low, high) for low in range(world) for high in range(low + 1, world)]
    groups = {pair: dist.new_group(list(pair)) for pair in pairs}
    singles = [dist.new_group([each]) for each in range(world)]
    works, right = [], []
    for pair, group in groups.items():
        if rank in pair:
            tensor = torch.full((1000,), 10.0**rank)
            works.append((dist.all_reduce(tensor, group=group, async_op=True), tensor))
            right.append(10.0 ** pair[0] + 10.0 ** pair[1])
    for work, _ in reversed(works):
        work.wait()
    alone = torch.full((3,), 5.0)
    dist.all_reduce(alone, group=singles[rank])
    gathered = torch.empty(3)
    all_gather(gathered, alone, singles[rank], async_op=False)
    dist.barrier(singles[rank])
    assert gathered.tolist() == alone.tolist() == [5.0] * 3
    return [tensor.unique().tolist() for _, tensor in works] == [[each] for each in right]


@pytest.mark.parametrize("world", WORLDS)
def test_overlapping_groups_and_groups_of_one(world):
    assert on_ranks(world, parts_of_the_world) == [True] * world


def not_a_member():
    rank, world = dist.get_rank(), dist.get_world_size()
    groups = [dist.new_group([each]) for each in range(world)]
    tensor = torch.ones(2)
    other = (rank + 1) % world
    with pytest.raises(PolyscaleError, match="not a member"):
        plugin().all_reduce(tensor, groups[other])
    with pytest.raises(PolyscaleError, match=f"holds ranks {rank}"):
        plugin().broadcast(tensor, other, groups[rank])
    return tensor.tolist()


def test_a_group_is_for_its_members():
    assert on_ranks(2, not_a_member) == [[1.0, 1.0]] * 2


def uneven_group():
    """Ranks 1 and 3 of four: ranks of the group are not those of the world."""
    rank = dist.get_rank()
    group = dist.new_group([1, 3])
    if rank not in (1, 3):
        return None
    tensor = torch.full((5,), float(rank))
    dist.broadcast(tensor, 3, group=group)
    received = torch.empty(2)
    if rank == 1:
        dist.send(torch.tensor([7.0, 8.0]), 3, group=group)
    else:
        dist.recv(received, 1, group=group)
    listed = [torch.zeros(1) for _ in range(2)] if rank == 3 else None
    dist.gather(torch.tensor([float(rank)]), listed, dst=3, group=group)
    return tensor.tolist(), received.tolist() if rank == 3 else [7.0, 8.0], [each.item() for each in listed or []]


@pytest.mark.long
def test_ranks_of_a_group_are_numbered_anew():
    found = on_ranks(4, uneven_group)
    assert found[1] == ([3.0] * 5, [7.0, 8.0], [])
    assert found[3] == ([3.0] * 5, [7.0, 8.0], [1.0, 3.0])


def mesh_slices():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("outer", "inner"))
    rank = dist.get_rank()
    rows, columns = torch.full((2,), float(rank)), torch.full((2,), float(rank))
    dist.all_reduce(rows, group=mesh.get_group("inner"))
    dist.all_reduce(columns, group=mesh.get_group("outer"))
    flat = mesh._flatten("flat")
    both = torch.full((2,), float(rank))
    dist.all_reduce(both, group=flat.get_group())
    whole = torch.arange(48.0).view(8, 6)
    spread = distribute_tensor(whole, mesh, [Shard(0), Shard(1)])
    turned = spread.redistribute(mesh, [Shard(1), Replicate()])
    assert torch.equal(turned.full_tensor(), whole)
    assert torch.equal(spread.full_tensor(), whole)
    sums = spread.sum(0)
    assert any(isinstance(each, Partial) for each in sums.placements)
    assert torch.equal(sums.full_tensor(), whole.sum(0))
    base = 2 * (rank // 2)
    others = [float(each) for each in range(world) if each % 2 == rank % 2]
    assert rows.tolist() == [2.0 * base + 1] * 2
    assert columns.tolist() == [sum(others)] * 2
    return both.tolist()


@pytest.mark.parametrize("world", WORLDS)
def test_slices_of_a_mesh(world):
    assert on_ranks(world, mesh_slices) == [[sum(range(world))] * 2] * world


def two_threads(rounds):
    """Two threads, a group each, never agreeing on whose turn it is."""
    rank, world = dist.get_rank(), dist.get_world_size()
    groups = [dist.new_group(list(range(world))) for _ in range(2)]
    wrong = []

    def work(which):
        try:
            for index in range(rounds):
                numel = (1, 300, 70_000)[index % 3]
                tensor = torch.full((numel,), float(rank + index + which))
                dist.all_reduce(tensor, group=groups[which])
                right = world * (index + which) + world * (world - 1) / 2
                if not (tensor == right).all():
                    wrong.append((which, index))
        except Exception as error:
            wrong.append((which, repr(error)))

    threads = [threading.Thread(target=work, args=(which,)) for which in ((0, 1) if rank % 2 else (1, 0))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return wrong


@pytest.mark.parametrize("world", WORLDS)
def test_two_threads_with_a_group_each(world):
    assert on_ranks(world, two_threads, 60) == [[]] * world


def one_group_from_two_threads():
    """One thread starts a collective, another waits for it while the first starts more."""
    rank, world = dist.get_rank(), dist.get_world_size()
    tensors = [torch.full((2000,), float(rank + index)) for index in range(40)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors[:20]]
    waiter = threading.Thread(target=lambda: [work.wait() for work in works])
    waiter.start()
    later = [dist.all_reduce(tensor, async_op=True) for tensor in tensors[20:]]
    for work in later:
        work.wait()
    waiter.join()
    sums = [world * index + world * (world - 1) / 2 for index in range(40)]
    return [tensor.unique().tolist() for tensor in tensors] == [[each] for each in sums]


def test_a_work_may_be_waited_for_in_another_thread():
    assert on_ranks(2, one_group_from_two_threads) == [True] * 2


def interleaved():
    """Two groups of the same ranks, called in another order by each rank: async calls never block each other."""
    rank = dist.get_rank()
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    tensors = [torch.full((100_000,), float(rank + 1)) for _ in groups]
    order = (0, 1) if rank == 0 else (1, 0)
    works = [dist.all_reduce(tensors[index], group=groups[index], async_op=True) for index in order]
    for work in works:
        work.wait()
    return [tensor.unique().tolist() for tensor in tensors]


def test_groups_do_not_wait_for_each_other():
    assert on_ranks(2, interleaved) == [[[3.0], [3.0]]] * 2


def come_and_go(rounds):
    rank = dist.get_rank()
    for index in range(rounds):
        group = dist.new_group([0, 1], timeout=timedelta(seconds=20))
        tensor = torch.full((10,), float(rank + index))
        dist.all_reduce(tensor, group=group)
        assert tensor.tolist() == [2.0 * index + 1] * 10
        dist.destroy_process_group(group)
    meet("after")
    last = torch.ones(2)
    dist.all_reduce(last)
    return last.tolist()


def test_groups_that_come_and_go():
    assert on_ranks(2, come_and_go, 20) == [[2.0, 2.0]] * 2


def left_early():
    """One rank ends its group while works of another rank are still under way: an error there, nothing worse."""
    rank = dist.get_rank()
    group = dist.new_group([0, 1], timeout=timedelta(seconds=5))
    if rank == 1:
        dist.destroy_process_group(group)
        meet("gone")
        return ""
    try:
        dist.all_reduce(torch.ones(1000), group=group)
    except RuntimeError as error:
        said = str(error)
    meet("gone")
    return said


@only_shm
def test_a_rank_that_has_left_a_group_is_named():
    said, _ = on_ranks(2, left_early)
    assert "rank 1" in said and "all_reduce" in said, said
