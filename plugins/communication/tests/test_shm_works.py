"""Works: order, many at once, dropped ones, futures, polling, failures, what they keep alive."""

import gc
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from shm_ranks import BACKEND, WORLDS, meet, on_new_ranks, on_ranks, only_shm, plugin, raised

from polyscale._torch import all_gather, reduce_scatter
from polyscale.errors import RankError


def waited_for_backwards():
    rank, world = dist.get_rank(), dist.get_world_size()
    tensors = [torch.full((n,), float(rank + 1)) for n in (1, 100, 70_000, 3, 0, 5000)]
    outputs = [torch.zeros(n * world) for n in (1, 100, 70_000, 3, 0, 5000)]
    works = []
    for tensor, output in zip(tensors, outputs, strict=True):
        works.append(all_gather(output, tensor.clone(), None, async_op=True))
        works.append(dist.all_reduce(tensor, async_op=True))
    order = list(reversed(works)) if rank % 2 else works[1::2] + works[::2]
    for work in order:
        work.wait()
    right = world * (world + 1) / 2
    assert all((tensor == right).all() for tensor in tensors)
    for output in outputs:
        assert output.view(world, -1).unique(dim=1).tolist() == [[r + 1.0] for r in range(world)] or not len(output)
    return "well"


@pytest.mark.parametrize("world", WORLDS)
def test_works_may_be_waited_for_in_another_order_on_each_rank(world):
    assert on_ranks(world, waited_for_backwards) == ["well"] * world


def many(count):
    rank, world = dist.get_rank(), dist.get_world_size()
    tensors = [torch.full((257,), float(rank + index)) for index in range(count)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    works[-1].wait()
    for work in works:
        work.wait()
    sums = [world * index + world * (world - 1) / 2 for index in range(count)]
    return [tensor.unique().tolist() for tensor in tensors] == [[each] for each in sums]


@pytest.mark.parametrize("world", WORLDS)
def test_hundreds_in_flight(world):
    assert on_ranks(world, many, 500) == [True] * world


def interrupted_behind_another():
    """Ctrl-C in a collective that waits behind one that another rank has not joined: what each rank is told."""
    if dist.get_rank() == 1:
        meet("interrupted")
        return [raised(lambda: dist.all_reduce(torch.ones(100_000)))]
    before = dist.all_reduce(torch.ones(100_000), async_op=True)
    time.sleep(0.3)  # the lane's own thread has begun it
    usual = signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        dist.all_reduce(torch.ones(50_000).clone())
        told = "nothing was raised"
    except KeyboardInterrupt:
        told = "interrupted"
    signal.signal(signal.SIGALRM, usual)
    again = raised(lambda: dist.all_reduce(torch.ones(3)))
    meet("interrupted")
    return [told, raised(before.wait), again]


@only_shm
def test_ctrl_c_in_a_collective_that_waits_behind_another_withdraws_it():
    (told, before, again), (other,) = on_new_ranks(2, interrupted_behind_another)
    assert told == "interrupted"
    assert "all_reduce number 2 was interrupted" in before
    assert "all_reduce number 2 was interrupted" in again
    assert "rank 0" in other and "gave up" in other and "was interrupted" in other


def in_place_one_after_another():
    tensor = torch.ones(1000)
    works = [dist.all_reduce(tensor, async_op=True) for _ in range(8)]
    for work in reversed(works):
        work.wait()
    for _ in range(3):
        dist.all_reduce(tensor, async_op=True)
    dist.all_reduce(tensor)  # synchronous, behind the others
    return tensor.unique().tolist()


@only_shm
def test_collectives_of_a_group_run_in_the_order_of_their_calls():
    assert on_ranks(2, in_place_one_after_another) == [[2.0**12]] * 2


def dropped():
    """Works and tensors of which nobody keeps a reference."""
    rank, world = dist.get_rank(), dist.get_world_size()
    for index in range(50):
        dist.all_reduce(torch.full((5000 + index,), float(rank)), async_op=True)
        all_gather(torch.empty(world * 100), torch.full((100,), 1.0), None, async_op=True)
        if index % 10 == 0:
            gc.collect()
        torch.full((5000 + index,), -1.0)  # may be given the memory that was let go
    last = torch.full((3,), float(rank + 1))
    dist.all_reduce(last)
    return last.tolist()


@pytest.mark.parametrize("world", WORLDS)
def test_works_that_nobody_waits_for(world):
    assert on_ranks(world, dropped) == [[world * (world + 1) / 2] * 3] * world


def held():
    world = dist.get_world_size()
    output = torch.empty(1000 * world)
    work = plugin().all_gather(output, torch.full((1000,), float(dist.get_rank())))
    for _ in range(20):
        torch.full((1000,), -1.0)
    work.wait()
    work.wait()
    return output.view(world, 1000)[:, 0].tolist()


def test_a_work_holds_its_tensors_and_may_be_waited_for_twice():
    assert on_ranks(2, held) == [[0.0, 1.0]] * 2


def futures():
    rank = dist.get_rank()
    tensor = torch.full((4,), rank + 1.0)
    work = dist.all_reduce(tensor, async_op=True)
    future = work.get_future()
    halved = future.then(lambda done: done.value()[0] / 2)
    found = halved.wait().tolist(), future.wait()[0].tolist()
    output = torch.empty(8)
    gathered = all_gather(output, tensor, None, async_op=True).get_future()
    gathered.wait()
    part = torch.empty(2)
    work = reduce_scatter(part, torch.arange(4.0), None, async_op=True)
    (work if BACKEND == "gloo" else work.get_future()).wait()  # gloo has none there
    return *found, output.tolist(), part.tolist()


def a_message_that_comes_late():
    late, early, own = torch.zeros(1), torch.ones(1), torch.full((1,), 7.0)
    if dist.get_rank() == 0:
        message = dist.irecv(late, 1).get_future()
        dist.all_reduce(early, async_op=True).get_future().wait()
        dist.send(own, 1)  # rank 1 sends what ``message`` is of when it has this
        message.wait()
        return late.tolist(), early.tolist()
    dist.all_reduce(early)
    dist.recv(late, 0)
    dist.send(own + 1, 0)
    return late.tolist(), early.tolist()


@only_shm  # gloo gives no futures there
def test_a_message_that_does_not_come_holds_up_no_other_future():
    assert on_ranks(2, a_message_that_comes_late) == [([8.0], [2.0]), ([7.0], [2.0])]


def test_futures():
    for rank, found in enumerate(on_ranks(2, futures)):
        assert found == ([1.5] * 4, [3.0] * 4, [3.0] * 8, [[0.0, 2.0], [4.0, 6.0]][rank])


def polled():
    """``is_completed`` must come true without any wait, and not before every rank has come."""
    rank = dist.get_rank()
    if rank == 1:
        time.sleep(0.3)
    tensor = torch.full((1000,), rank + 1.0)
    began = time.monotonic()
    work = dist.all_reduce(tensor, async_op=True)
    launched = time.monotonic() - began
    early = work.is_completed()
    deadline = time.monotonic() + 20
    while not work.is_completed() and time.monotonic() < deadline:
        time.sleep(0.001)
    return launched < 0.25 or rank == 1, early and rank == 0, work.is_completed(), tensor.unique().tolist()


def test_polling_completes_a_work_and_starting_one_does_not_block():
    assert on_ranks(2, polled) == [(True, False, True, [3.0])] * 2


def lonely():
    group = dist.new_group(timeout=timedelta(seconds=2))
    if dist.get_rank() == 1:
        return "left", "", 0.0
    began = time.monotonic()
    with pytest.raises(RankError) as caught:
        plugin().all_reduce(torch.zeros(1), group).wait()
    took = time.monotonic() - began
    work = dist.all_reduce(torch.zeros(1), group=group, async_op=True)
    with pytest.raises(RuntimeError) as again:
        work.wait()
    return str(caught.value), str(again.value), took


def test_a_rank_that_does_not_come_is_named_with_the_operation():
    (said, again, took), (left, _, _) = on_ranks(2, lonely)
    assert left == "left"
    assert said.startswith("all_reduce on rank 0")
    assert took < 15
    if BACKEND == "shm":
        for text in (said.partition("on rank 0")[2], again):
            assert "rank 1" in text, text
        assert "all_reduce" in again


def short_waits():
    """A wait with a time-out of its own."""
    rank = dist.get_rank()
    if rank == 1:
        time.sleep(1.5)
    tensor = torch.ones(3)
    work = dist.all_reduce(tensor, async_op=True)
    said = ""
    if rank == 0:
        try:
            work.wait(timedelta(seconds=0.3))
        except RuntimeError as error:
            said = str(error)
    return said


@pytest.mark.long
@only_shm
def test_a_wait_that_is_too_short_is_an_error():
    said, _ = on_ranks(2, short_waits)
    assert "all_reduce" in said and "rank 1" in said, said


def idle_threads():
    import threading

    before = set(threading.enumerate())
    for _ in range(3):
        dist.all_reduce(torch.ones(2), async_op=True).wait()
    return len(set(threading.enumerate()) - before)


def test_a_group_starts_few_threads():
    assert all(count <= 2 for count in on_ranks(2, idle_threads))
