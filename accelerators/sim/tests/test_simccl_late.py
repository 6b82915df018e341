"""Late collectives: results appear where, and only where, a stream has waited for them."""

import time

import pytest
import torch
import torch.distributed as dist

from polyscale.testing import ranks

DEVICE = "sim"


@pytest.fixture(autouse=True, scope="module")
def on_time_again():
    yield
    ranks(2, accelerator="sim").run(set_late, False)


def set_late(on):
    from polyscale_sim import faults

    faults.late(on)


def late(function, *args):
    return ranks(2, accelerator="sim").run(with_late, function, args)


def with_late(function, args):
    set_late(True)
    try:
        return function(*args)
    finally:
        set_late(False)


def seen(tensor):
    """What an operator of the current stream reads."""
    return (tensor + 0).cpu()


def lost(tensor):
    return bool(seen(tensor).isnan().all())


def every_kind():
    rank = dist.get_rank()
    mine = torch.full((2,), rank + 1.0, device=DEVICE)
    one, whole, half = mine.clone(), torch.zeros(4, device=DEVICE), torch.zeros(1, device=DEVICE)
    sent, swapped = mine.clone(), torch.zeros(2, device=DEVICE)
    received, listed = torch.zeros(2, device=DEVICE), [torch.zeros(2, device=DEVICE) for _ in range(2)]
    written = [one, whole, half, swapped, received, *listed]
    works = [
        dist.all_reduce(one, async_op=True),
        dist.all_gather_single(whole, mine, async_op=True),
        dist.reduce_scatter_single(half, mine, async_op=True),
        dist.broadcast(sent, 0, async_op=True),
        dist.all_to_all_single(swapped, mine, async_op=True),
        dist.irecv(received, 1 - rank),
        dist.isend(mine, 1 - rank),
        dist.all_gather(listed, mine, async_op=True),
    ]
    before = [lost(tensor) for tensor in written] + [lost(sent) or rank == 0]
    assert seen(mine).tolist() == [rank + 1.0] * 2
    for work in works:
        work.wait()
    return before, [seen(tensor).tolist() for tensor in (*written, sent)]


def test_results_are_nan_until_the_work_is_waited_for():
    for rank, (before, found) in enumerate(late(every_kind)):
        assert before == [True] * 8
        other = [2.0 - rank] * 2
        expected = [[3.0, 3.0], [1.0, 1.0, 2.0, 2.0], [3.0], [1.0, 2.0], other, [1.0, 1.0], [2.0, 2.0], [1.0, 1.0]]
        assert found == expected


def other_dtypes():
    found = []
    for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.uint8):
        tensor = torch.zeros(2).to(dtype).to(DEVICE)
        work = dist.broadcast(tensor, 0, async_op=True)
        found.append(tensor.cpu().double().tolist() if dist.get_rank() else None)
        work.wait()
        assert tensor.cpu().double().tolist() == [0.0, 0.0]
    return found


def test_narrow_floats_are_nan_and_integers_have_all_bits_set():
    _, (half, eighth, integer, byte) = late(other_dtypes)
    assert all(value != value for value in half + eighth)
    assert integer == [-1.0, -1.0]
    assert byte == [255.0, 255.0]


def streams():
    tensor = torch.full((2,), dist.get_rank() + 1.0, device=DEVICE)
    main = torch.accelerator.current_stream()
    side = torch.Stream(device=tensor.device)
    side.wait_stream(main)
    with side:
        dist.all_reduce(tensor)
        on_side = (tensor * 1).cpu()
    second = torch.full((2,), dist.get_rank() + 1.0, device=DEVICE)
    side.wait_stream(main)
    with side:
        dist.all_reduce(second)
    before = lost(second)
    main.wait_stream(side)
    return on_side.tolist(), before, seen(second).tolist()


def test_a_wait_of_another_stream_does_not_count():
    assert late(streams) == [([3.0, 3.0], True, [3.0, 3.0])] * 2


def late_futures():
    tensor = torch.full((2,), dist.get_rank() + 1.0, device=DEVICE)
    work = dist.all_reduce(tensor, async_op=True)
    future = work.get_future()
    while not work.is_completed():
        time.sleep(0.001)
    before = lost(tensor)
    doubled = future.then(lambda done: done.value()[0] * 2).wait()
    return before, seen(future.wait()[0]).tolist(), seen(doubled).tolist()


def test_a_future_orders_as_a_work_does():
    assert late(late_futures) == [(True, [3.0, 3.0], [6.0, 6.0])] * 2


def chained():
    tensor = torch.full((2,), dist.get_rank() + 1.0, device=DEVICE)
    first = dist.all_reduce(tensor, async_op=True)
    second = dist.all_reduce(tensor, async_op=True)
    first.wait()
    early = lost(tensor)
    second.wait()
    found = seen(tensor).tolist()
    gathered = torch.zeros(4, device=DEVICE)
    one = dist.all_reduce(tensor, async_op=True)
    two = dist.all_gather_single(gathered, tensor, async_op=True)
    two.wait()
    one.wait()
    return early, found, seen(gathered).tolist(), seen(tensor).tolist()


def test_a_collective_on_what_an_earlier_one_still_brings_comes_behind_it():
    assert late(chained) == [(True, [6.0, 6.0], [12.0] * 4, [12.0] * 2)] * 2


def overwritten():
    mine, whole = torch.ones(2, device=DEVICE), torch.zeros(4, device=DEVICE)
    work = dist.all_gather_single(whole, mine, async_op=True)
    mine.fill_(7)
    with pytest.raises(RuntimeError, match="overwritten before its collective was waited for"):
        work.wait()
    work = dist.all_gather_single(whole, whole.view(2, 2)[dist.get_rank()], async_op=True)  # its input is in its output
    work.wait()


def test_an_input_that_is_overwritten_too_early_is_an_error():
    late(overwritten)


def synchronous():
    tensor = torch.full((2,), dist.get_rank() + 1.0, device=DEVICE)
    dist.all_reduce(tensor)
    strided = torch.zeros(3, 2, device=DEVICE)[1]
    dist.broadcast(strided, 0)
    return seen(tensor).tolist(), seen(strided).tolist()


def test_synchronous_collectives_need_no_further_wait():
    assert late(synchronous) == [([3.0, 3.0], [0.0, 0.0])] * 2


def torch_ddp():
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2).to(DEVICE)
    wrapped = DistributedDataParallel(model, device_ids=[dist.get_rank()])
    wrapped(torch.ones(3, 4, device=DEVICE)).sum().backward()
    return [parameter.grad.cpu().tolist() for parameter in model.parameters()]


def test_torch_s_own_ddp_forgets_no_wait():
    assert late(torch_ddp) == [[[[3.0] * 4] * 2, [3.0] * 2]] * 2
