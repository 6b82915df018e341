"""Sends and receives: order, tags, sizes, patterns that must not lock up."""

import pytest
import torch
import torch.distributed as dist
from shm_ranks import MOVED_ONLY, REDUCED, WORLDS, bits, on_ranks, only_shm, plugin, raised, same_bits

LARGE = 3 * 2**20 + 1


def sends_before_receives(numel):
    """Both ranks send first and receive later, from the same thread."""
    rank = dist.get_rank()
    sent = [torch.full((numel,), float(10 * rank + index)) for index in range(5)]
    received = [torch.zeros(numel) for _ in range(5)]
    works = [dist.isend(tensor, 1 - rank, tag=index % 2) for index, tensor in enumerate(sent)]
    works += [dist.irecv(tensor, 1 - rank, tag=index % 2) for index, tensor in enumerate(received)]
    for work in works:
        work.wait()
    return [tensor.unique().tolist() for tensor in received]


@pytest.mark.parametrize("numel", [1, 1000, LARGE // 3])
def test_both_send_before_they_receive(numel):
    tens, ones = [[float(10 + index)] for index in range(5)], [[float(index)] for index in range(5)]
    assert on_ranks(2, sends_before_receives, numel) == [tens, ones]


def receives_in_another_order():
    """Receives by tag in the reverse order of the sends; the works waited for in any order."""
    rank = dist.get_rank()
    if rank == 0:
        works = [dist.isend(torch.full((index + 1,), float(index)), 1, tag=index) for index in range(6)]
        for work in works:
            work.wait()
        return []
    received = {index: torch.empty(index + 1) for index in range(6)}
    works = [dist.irecv(received[index], 0, tag=index) for index in (5, 3, 4, 0, 2, 1)]
    for work in reversed(works):
        work.wait()
    return [received[index].tolist() for index in range(6)]


def test_tags_choose_the_message():
    _, found = on_ranks(2, receives_in_another_order)
    assert found == [[float(index)] * (index + 1) for index in range(6)]


def posted_early_and_late():
    """A receive that is posted before the send, one long after it, and messages that pass a collective."""
    import time

    rank = dist.get_rank()
    first, second = torch.zeros(100_000), torch.zeros(3)
    if rank == 0:
        time.sleep(0.2)
        dist.send(torch.ones(100_000), 1)
        work = dist.isend(torch.full((3,), 2.0), 1)
        dist.barrier()
        work.wait()
    else:
        dist.recv(first, 0)
        dist.barrier()
        time.sleep(0.2)
        dist.recv(second, 0)
    total = torch.ones(1)
    dist.all_reduce(total)
    return first.unique().tolist(), second.tolist(), total.item()


def test_messages_that_wait_for_their_receiver():
    assert on_ranks(2, posted_early_and_late)[1] == ([1.0], [2.0] * 3, 2.0)


def sent_and_overwritten():
    """A send that was waited for may be overwritten."""
    rank = dist.get_rank()
    for numel in (5, 100_000):
        if rank == 0:
            tensor = torch.full((numel,), 1.0)
            work = dist.isend(tensor, 1)
            work.wait()
            tensor.fill_(-1)
            dist.barrier()
        else:
            tensor = torch.zeros(numel)
            work = dist.irecv(tensor, 0)
            work.wait()
            dist.barrier()
            assert tensor.unique().tolist() == [1.0]
    return "well"


def test_a_finished_send_is_finished():
    assert on_ranks(2, sent_and_overwritten) == ["well"] * 2


def batched(numel):
    """batch_isend_irecv with every other rank, in both directions."""
    rank, world = dist.get_rank(), dist.get_world_size()
    others = [each for each in range(world) if each != rank]
    received = {each: torch.zeros(numel + each) for each in others}
    operations = [dist.P2POp(dist.isend, torch.full((numel + rank,), float(rank)), each) for each in others]
    operations += [dist.P2POp(dist.irecv, received[each], each) for each in reversed(others)]
    if rank % 2:
        operations.reverse()
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return all((received[each] == each).all() for each in others)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("numel", [0, 1, 100_000])
def test_batches_of_sends_and_receives(world, numel):
    assert on_ranks(world, batched, numel) == [True] * world


def from_anyone():
    rank, world = dist.get_rank(), dist.get_world_size()
    if rank:
        dist.send(torch.full((3,), float(rank)), 0)
        return []
    found = []
    for _ in range(world - 1):
        tensor = torch.zeros(3)
        source = dist.recv(tensor)
        found.append((source, tensor.tolist()))
    return sorted(found)


@pytest.mark.parametrize("world", WORLDS)
def test_a_receive_from_anyone(world):
    assert on_ranks(world, from_anyone)[0] == [(each, [float(each)] * 3) for each in range(1, world)]


def every_dtype():
    rank = dist.get_rank()
    wrong = []
    for dtype in (*REDUCED, *MOVED_ONLY):
        for numel in (0, 1, 17, 70_001):
            if rank == 0:
                dist.send(bits(dtype, numel, 0), 1)
            else:
                tensor = bits(dtype, numel, 99)
                dist.recv(tensor, 0)
                if not same_bits(tensor, bits(dtype, numel, 0)):
                    wrong.append((dtype, numel))
    return wrong


@only_shm
def test_every_dtype_is_sent():
    assert on_ranks(2, every_dtype) == [[], []]


def other_sizes():
    rank = dist.get_rank()
    if rank == 0:
        for sent in (torch.ones(3), torch.ones(2, dtype=torch.float64), torch.ones(2)):
            work = dist.isend(sent, 1)
            try:
                work.wait()
            except RuntimeError as error:
                assert "send" in str(error), error
        dist.barrier()
        return []
    said = [raised(lambda: dist.recv(torch.zeros(2), 0)) for _ in range(2)]
    received = torch.zeros(2)
    dist.recv(received, 0)
    dist.barrier()
    return [*said, received.tolist()]


@only_shm
def test_a_receive_of_another_size_is_an_error_and_the_next_one_works():
    _, (size, dtype, received) = on_ranks(2, other_sizes)
    assert "3" in size and "2" in size and "rank 0" in size and "recv" in size, size
    assert received == [1.0, 1.0]
    assert dtype != "nothing was raised", dtype


def refused_at_once():
    rank = dist.get_rank()
    said = []
    for call in (
        lambda: plugin().send(torch.ones(2), rank),
        lambda: plugin().recv(torch.ones(2), 7),
        lambda: plugin().send(torch.ones(2, 2).t(), 1 - rank),
    ):
        said.append(raised(call))
    dist.barrier()
    return said


def test_bad_peers_are_refused():
    for itself, stranger, gaps in on_ranks(2, refused_at_once):
        assert "itself" in itself
        assert "holds ranks 0, 1" in stranger
        assert "contiguous" in gaps


def pipeline(rounds):
    """What a schedule of pipeline stages does: activations one way, gradients the other, no common order."""
    rank = dist.get_rank()
    gone, works = [], []
    for index in range(rounds):
        if rank == 0:
            works.append(dist.isend(torch.full((5000,), float(index)), 1))
            if index >= 2:
                back = torch.empty(5000)
                dist.recv(back, 1)
                gone.append(back[0].item())
        else:
            here = torch.empty(5000)
            dist.recv(here, 0)
            works.append(dist.isend(here * 2, 0))
    if rank == 0:
        for _ in range(2):
            back = torch.empty(5000)
            dist.recv(back, 1)
            gone.append(back[0].item())
    for work in works:
        work.wait()
    return gone


def test_two_way_traffic_of_a_pipeline():
    assert on_ranks(2, pipeline, 50)[0] == [2.0 * index for index in range(50)]
