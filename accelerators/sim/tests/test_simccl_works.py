"""Works of simccl: order, completion, failures, futures, and what they keep alive."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from polyscale.discovery import load
from polyscale.errors import RankError
from polyscale.testing import ranks

DEVICE = "sim"


def on_sim(function, *args):
    return ranks(2, accelerator="sim").run(function, *args)


def many_in_order():
    tensor = torch.ones(1000, device=DEVICE)
    works = [dist.all_reduce(tensor, async_op=True) for _ in range(10)]
    works[-1].wait()
    assert all(work.is_completed() and work.is_success() for work in works)
    assert works[-1].result()[0].data_ptr() == tensor.data_ptr()
    for _ in range(3):
        dist.all_reduce(tensor, async_op=True)
    dist.all_reduce(tensor)  # synchronous, behind the others
    return tensor.unique().tolist()


def test_collectives_of_a_group_run_in_the_order_of_their_calls():
    assert on_sim(many_in_order) == [[2.0**14]] * 2


def futures():
    rank = dist.get_rank()
    tensor = torch.full((4,), rank + 1.0, device=DEVICE)
    future = dist.all_reduce(tensor, async_op=True).get_future()
    halved = future.then(lambda done: done.value()[0] / 2)
    work = dist.all_reduce(torch.ones(2 + rank, device=DEVICE), async_op=True)
    failed = work.get_future()
    with pytest.raises(RuntimeError, match="different collectives"):
        failed.wait()
    assert work.is_completed() and not work.is_success()
    assert "different collectives" in str(work.exception())
    return future.wait()[0].tolist(), halved.wait().tolist()


def test_futures_give_results_and_errors():
    assert on_sim(futures) == [([3.0] * 4, [1.5] * 4)] * 2


def nothing_else_holds_them():
    world = dist.get_world_size()
    output = torch.empty(1000 * world, device=DEVICE)
    work = dist.all_gather_single(output, torch.full((1000,), float(dist.get_rank()), device=DEVICE), async_op=True)
    for _ in range(20):
        torch.full((1000,), -1.0, device=DEVICE)
    work.wait()
    work.wait()
    return output.view(world, 1000)[:, 0].tolist()


def test_a_work_keeps_its_tensors_and_may_be_waited_for_twice():
    assert on_sim(nothing_else_holds_them) == [[0.0, 1.0]] * 2


def lonely():
    simccl = load("communication", "simccl")
    group = dist.new_group(timeout=timedelta(seconds=2))
    if dist.get_rank() == 1:
        return "left"
    with pytest.raises(RankError) as caught:
        simccl.all_reduce(torch.zeros(1, device=DEVICE), group).wait()
    work = dist.all_reduce(torch.zeros(1, device=DEVICE), group=group, async_op=True)
    with pytest.raises(RuntimeError):
        work.wait(timedelta(seconds=0.2))
    return str(caught.value)


def test_a_rank_that_does_not_come_is_an_error_not_a_wait_for_ever():
    said, left = on_sim(lonely)
    assert left == "left"
    assert said.startswith("all_reduce on rank 0")


def torch_ddp(hooked):
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).to(DEVICE)
    wrapped = DistributedDataParallel(model, device_ids=[dist.get_rank()])
    if hooked:
        wrapped.register_comm_hook(None, allreduce_hook)
    data = torch.arange(32.0).view(4, 8)[dist.get_rank() :: 2].to(DEVICE) / 32
    wrapped(data).square().mean().backward()
    return [parameter.grad.cpu() for parameter in model.parameters()]


@pytest.mark.parametrize("hooked", [False, True])
def test_torch_s_own_ddp_and_its_hooks_reduce_on_the_device(hooked):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    model(torch.arange(32.0).view(4, 8) / 32).square().mean().backward()
    for found in on_sim(torch_ddp, hooked):
        for gradient, parameter in zip(found, model.parameters(), strict=True):
            torch.testing.assert_close(gradient, parameter.grad, rtol=1e-5, atol=1e-7)


def pairs_of_other_sizes():
    rank = dist.get_rank()
    if rank == 0:
        for sent in (torch.ones(3), torch.ones(2, dtype=torch.float64), torch.ones(2), torch.ones(1)):
            dist.send(sent.to(DEVICE), 1)
        return []
    said = []
    for _ in range(2):
        with pytest.raises(RuntimeError) as caught:
            dist.recv(torch.zeros(2, device=DEVICE), 0)
        said.append(str(caught.value))
    received = torch.zeros(2, device=DEVICE)
    dist.recv(received)
    with pytest.raises(RuntimeError, match="rank 0 of the group sends 1 of"):
        dist.recv(torch.zeros(2, device=DEVICE))
    return [*said, received.tolist()]


def test_a_receive_of_another_size_is_an_error_and_the_next_one_works():
    _, (size, dtype, received) = on_sim(pairs_of_other_sizes)
    assert "sends 3 of torch.float32" in size
    assert "sends 2 of torch.float64" in dtype
    assert received == [1.0, 1.0]


def many_pairs():
    rank = dist.get_rank()
    sent = [torch.full((1000,), float(10 * rank + i), device=DEVICE) for i in range(5)]
    received = [torch.zeros(1000, device=DEVICE) for _ in range(5)]
    works = [dist.isend(tensor, 1 - rank, tag=i % 2) for i, tensor in enumerate(sent)]
    works += [dist.irecv(tensor, 1 - rank, tag=i % 2) for i, tensor in enumerate(received)]
    for work in works:  # sends first: the receives must not need this thread
        work.wait()
    return [tensor[0].item() for tensor in received]


def test_pairs_keep_their_order_by_tag():
    assert on_sim(many_pairs) == [[10.0, 11.0, 12.0, 13.0, 14.0], [0.0, 1.0, 2.0, 3.0, 4.0]]


def idle():
    import threading

    from polyscale_sim.communication import queue

    queue.IDLE_S = 0.2
    try:
        group = dist.new_group()
        tensor = torch.ones(1, device=DEVICE)
        before = {thread for thread in threading.enumerate() if thread.name == "simccl"}
        dist.all_reduce(tensor, group=group)  # synchronous: on this thread
        assert before == {thread for thread in threading.enumerate() if thread.name == "simccl"}
        dist.all_reduce(tensor, group=group, async_op=True).wait()
        own = {thread for thread in threading.enumerate() if thread.name == "simccl"} - before
        for thread in own:
            thread.join(10)
        dist.all_reduce(tensor, group=group, async_op=True).wait()
        return len(own), any(thread.is_alive() for thread in own), tensor.item()
    finally:
        queue.IDLE_S = 10.0


def test_the_thread_of_an_idle_group_ends_and_comes_again():
    assert on_sim(idle) == [(1, False, 8.0)] * 2
