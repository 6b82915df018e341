"""Buffers of ``allocate``: as inputs and outputs, in part, overlapping their own output, freed early."""

import gc

import pytest
import torch
import torch.distributed as dist
from shm_ranks import WORLDS, bits, on_ranks, plugin, reduced, same_bits, same_numbers, values

from polyscale._torch import all_gather, reduce_scatter

CPU = torch.device("cpu")


def buffer(numel, dtype=torch.float32):
    return plugin().allocate(numel, dtype=dtype, device=CPU)


def filled(data):
    """``data`` in a buffer."""
    return buffer(data.numel(), data.dtype).copy_(data)


def kinds():
    """A buffer is a 1-D tensor of the dtype and length asked for, that can be used as any other."""
    for dtype in (torch.float32, torch.bfloat16, torch.uint8, torch.float8_e4m3fn, torch.complex64, torch.bool):
        for numel in (0, 1, 100_001):
            made = buffer(numel, dtype)
            assert made.shape == (numel,) and made.dtype == dtype and made.is_contiguous()
            assert made.device.type == "cpu"
            assert made.data_ptr() % 64 == 0 or not numel
    made = buffer(6).copy_(torch.arange(6.0))
    parameter = torch.nn.Parameter(made.view(2, 3))
    (parameter * 2).sum().backward()
    assert parameter.grad.unique().tolist() == [2.0]
    copied = made.clone()
    del parameter, made
    gc.collect()
    return copied.tolist()


def test_a_buffer_is_an_ordinary_tensor():
    assert on_ranks(2, kinds) == [[0.0, 1, 2, 3, 4, 5]] * 2


def wrong_calls():
    found = []
    for call in (
        lambda: plugin().allocate(-1, dtype=torch.float32, device=CPU),
        lambda: plugin().allocate(1 << 60, dtype=torch.float32, device=CPU),
    ):
        try:
            call()
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


def test_a_buffer_that_cannot_be_is_an_error():
    for found in on_ranks(2, wrong_calls):
        assert len(found) == 2


def in_and_out(numel):
    """Each of input and output an ordinary tensor or a buffer, differently on each rank."""
    rank, world = dist.get_rank(), dist.get_world_size()
    place = (filled, torch.clone)
    wrong = []
    for turn in range(4):
        give = place[(turn + rank) % 2]
        take = place[(turn // 2 + rank) % 2]
        for dtype in (torch.float32, torch.bfloat16, torch.uint8):
            inputs = [values(dtype, numel * world, each) for each in range(world)]
            own = give(inputs[rank])
            whole, part = take(bits(dtype, numel * world * world, 99)), take(bits(dtype, numel, 99))
            swapped, summed = take(bits(dtype, numel * world, 99)), take(inputs[rank])
            sent, received = take(inputs[rank]), take(bits(dtype, numel * world, 99))
            all_gather(whole, own, None, async_op=False)
            reduce_scatter(part, own, None, async_op=False)
            dist.all_to_all_single(swapped, own)
            dist.all_reduce(summed)
            dist.broadcast(sent, world - 1)
            for work in [dist.isend(own, (rank + 1) % world), dist.irecv(received, (rank - 1) % world)]:
                work.wait()
            mine = slice(rank * numel, (rank + 1) * numel)
            total = reduced("SUM", inputs)
            good = [
                same_bits(own, inputs[rank]),
                same_bits(whole, torch.cat(inputs)),
                same_numbers(part, total[mine]),
                same_bits(swapped, torch.cat([each[mine] for each in inputs])),
                same_numbers(summed, total),
                same_bits(sent, inputs[-1]),
                same_bits(received, inputs[rank - 1]),
            ]
            wrong += [] if all(good) else [(turn, dtype, good)]
    return wrong


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("numel", [1, 1001, pytest.param(150_001, marks=pytest.mark.long)])
def test_buffers_and_ordinary_tensors_together(world, numel):
    assert on_ranks(world, in_and_out, numel) == [[]] * world


def odd_offsets():
    """Views that begin and end anywhere in a buffer; what lies beside them is left alone."""
    rank, world = dist.get_rank(), dist.get_world_size()
    wrong = []
    for dtype in (torch.uint8, torch.bfloat16, torch.float32):
        source, target = buffer(40_000, dtype), buffer(40_000 * world, dtype)
        for first, numel in ((1, 1), (3, 13), (7, 1000), (4095, 4098), (1, 39_998), (13, 0)):
            inputs = [values(dtype, 40_000, each) for each in range(world)]
            source.copy_(inputs[rank])
            target.fill_(77)
            here = slice(first, first + numel)
            all_gather(target[first : first + numel * world], source[here], None, async_op=False)
            right = torch.full_like(target, 77)
            right[first : first + numel * world] = torch.cat([each[here] for each in inputs])
            wrong += [] if same_bits(target, right) else [("all_gather", dtype, first, numel)]
            dist.all_reduce(source[here])
            right = inputs[rank].clone()
            right[here] = reduced("SUM", [each[here] for each in inputs])
            wrong += [] if same_numbers(source, right) else [("all_reduce", dtype, first, numel)]
            if numel % world == 0:
                given, target2 = filled(inputs[rank]), torch.full((numel // world + 2,), 77).to(dtype)
                reduce_scatter(target2[1:-1], given[here], None, async_op=False)
                total = reduced("SUM", [each[here] for each in inputs]).chunk(world)[rank] if numel else target2[:0]
                good = same_numbers(target2[1:-1], total) and target2[[0, -1]].float().tolist() == [77.0, 77.0]
                wrong += [] if good else [("reduce_scatter", dtype, first, numel)]
    return wrong


@pytest.mark.parametrize("world", WORLDS)
def test_views_at_odd_offsets(world):
    assert on_ranks(world, odd_offsets) == [[]] * world


def in_its_own_output():
    """all_gather whose input is its place in the output; reduce_scatter into its place in the input."""
    rank, world = dist.get_rank(), dist.get_world_size()
    wrong = []
    for make in (buffer, torch.empty):
        for numel in (1, 1001, 70_000, 400_003):
            inputs = [values(torch.float32, numel, each) for each in range(world)]
            whole = make(numel * world).fill_(-7)
            place = whole[rank * numel : (rank + 1) * numel]
            place.copy_(inputs[rank])
            work = all_gather(whole, place, None, async_op=True)
            work.wait()
            wrong += [] if same_bits(whole, torch.cat(inputs)) else [("all_gather", make.__name__, numel)]
            wide = [values(torch.float32, numel * world, each, seed=1) for each in range(world)]
            whole.copy_(wide[rank])
            reduce_scatter(place, whole, None, async_op=False)
            right = reduced("SUM", wide).view(world, -1)[rank]
            wrong += [] if same_numbers(place, right) else [("reduce_scatter", make.__name__, numel)]
            others = [each for each in range(world) if each != rank]
            kept = torch.equal(whole.view(world, -1)[others], wide[rank].view(world, -1)[others])
            wrong += [] if kept else [("reduce_scatter changed its input", make.__name__, numel)]
    return wrong


@pytest.mark.parametrize("world", WORLDS)
def test_an_input_inside_its_output(world):
    assert on_ranks(world, in_its_own_output) == [[]] * world


def written_right_after():
    """A rank that is done may write over its input at once: the others have read it, or get a copy."""
    import time

    rank, world = dist.get_rank(), dist.get_world_size()
    wrong = []
    for make in (buffer, torch.empty):
        for turn in range(6):
            numel = (1, 500, 80_000)[turn % 3]
            own, whole = make(numel).fill_(float(rank + turn)), make(numel * world)
            if turn % world == rank:
                time.sleep(0.003)
            all_gather(whole, own, None, async_op=True).wait()
            own.fill_(-1)
            part = make(numel)
            wide = make(numel * world).fill_(float(rank + turn))
            reduce_scatter(part, wide, None, async_op=False)
            wide.fill_(-1)
            del wide
            sent = make(numel).fill_(float(turn + rank))
            dist.broadcast(sent, turn % world)
            if rank == turn % world:
                sent.fill_(-5)
            elif sent.unique().tolist() != [float(turn + turn % world)]:
                wrong.append(("broadcast", make.__name__, turn))
            total = world * turn + world * (world - 1) / 2
            rows = whole.view(world, -1).unique(dim=1).flatten().tolist()
            if rows != [float(each + turn) for each in range(world)]:
                wrong.append(("all_gather", make.__name__, turn))
            if part.unique().tolist() != [total]:
                wrong.append(("reduce_scatter", make.__name__, turn))
    return wrong


@pytest.mark.parametrize("world", WORLDS)
def test_what_was_sent_may_be_overwritten_after_the_wait(world):
    assert on_ranks(world, written_right_after) == [[]] * world


def freed_early():
    """Buffers that nobody holds while their collective runs, and new ones that may take their place."""
    rank, world = dist.get_rank(), dist.get_world_size()
    works, outputs = [], []
    for index in range(40):
        output = torch.empty(5000 * world)
        works.append(all_gather(output, buffer(5000).fill_(float(rank + index)), None, async_op=True))
        outputs.append(output)
        buffer(5000).fill_(-1)
    for work in works:
        work.wait()
    right = [[float(each + index) for each in range(world)] for index in range(40)]
    return [output.view(world, -1).unique(dim=1).flatten().tolist() for output in outputs] == right


@pytest.mark.parametrize("world", WORLDS)
def test_buffers_that_are_let_go_while_their_collective_runs(world):
    assert on_ranks(world, freed_early) == [True] * world


def long_lived():
    """A buffer outlives its group, and serves in the next one."""
    made = buffer(1000).fill_(dist.get_rank() + 1.0)
    dist.all_reduce(made)
    first = made.unique().tolist()
    from shm_ranks import BACKEND, regroup

    regroup(BACKEND, prefix="another")
    assert made.unique().tolist() == first
    dist.all_reduce(made)
    return made.unique().tolist()


def test_a_buffer_outlives_its_group():
    assert on_ranks(2, long_lived) == [[6.0]] * 2
