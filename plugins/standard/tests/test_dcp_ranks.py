import math
import os
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from polyscale.errors import CheckpointError
from polyscale.interfaces.checkpoint import Box, LogicalTensor
from polyscale.testing import ranks
from polyscale_standard.checkpoint import DcpStorage

SHAPE = (7, 5)


def full(dtype=torch.float32):
    return torch.arange(math.prod(SHAPE), dtype=dtype).view(SHAPE)


def rows(tensor, rank, world):
    """The part of a tensor that ``rank`` holds when it is cut by rows, as one box (possibly empty)."""
    size = -(-tensor.shape[0] // world)
    first = min(rank * size, tensor.shape[0])
    part = tensor[first : first + size]
    return LogicalTensor(tuple(tensor.shape), tensor.dtype, (Box((first, 0), part),))


def flat(tensor, rank, world):
    """The part that ``rank`` holds when the flattened tensor is cut evenly: up to three boxes of one flat memory."""
    columns = tensor.shape[1]
    size = -(-tensor.numel() // world)
    first, end = min(rank * size, tensor.numel()), min((rank + 1) * size, tensor.numel())
    memory = tensor.flatten()[first:end].clone()
    boxes, at = [], first
    while at < end:
        row, column = divmod(at, columns)
        length = min(end - at, columns - column) if column or end - at < columns else (end - at) // columns * columns
        shape = (1, length) if length < columns or column else (length // columns, columns)
        boxes.append(Box((row, column), memory[at - first : at - first + length].view(shape)))
        at += length
    return memory, LogicalTensor(tuple(tensor.shape), tensor.dtype, tuple(boxes))


def replicated(tensor, rank):
    return LogicalTensor(tuple(tensor.shape), tensor.dtype, (Box((0,) * tensor.ndim, tensor, owner=rank == 0),))


def group_of(size):
    """A group of the first ``size`` ranks; None stands for all of them. Collective."""
    if size == dist.get_world_size():
        return None
    return dist.new_group(list(range(size)), timeout=timedelta(seconds=20))


def save(path, world, cut):
    """Write, from the first ``world`` ranks, one tensor cut by ``cut`` and one replicated."""
    rank, group = dist.get_rank(), group_of(world)
    if rank >= world:
        return
    cut_tensor = rows(full(), rank, world) if cut == "rows" else flat(full(), rank, world)[1]
    tensors = {"cut": cut_tensor, "same": replicated(torch.tensor(3.0), rank)}
    if rank == world - 1:  # as of a pipeline stage: known to one rank only
        tensors["own"] = LogicalTensor((2,), torch.int64, (Box((0,), torch.tensor([4, 5])),))
    DcpStorage().write(path, tensors, group)


def load(path, world, cut):
    """Read in the first ``world`` ranks and return what each holds, beside what it should hold."""
    rank, group = dist.get_rank(), group_of(world)
    if rank >= world:
        return None
    scalar, own = torch.zeros((), dtype=torch.float64), torch.zeros(2)
    tensors = {"same": replicated(scalar, 0), "own": replicated(own, 1)}
    if cut == "rows":
        target = torch.full(SHAPE, -1.0, dtype=torch.float64)
        tensors["cut"] = rows(target, rank, world)
        held, wanted = tensors["cut"].boxes[0].data, rows(full(torch.float64), rank, world).boxes[0].data
    else:
        held, tensors["cut"] = flat(torch.full(SHAPE, -1.0), rank, world)
        wanted = flat(full(), rank, world)[0]
    DcpStorage().read(path, tensors, group)
    return torch.equal(held, wanted), scalar.item(), own.tolist()


@pytest.mark.parametrize("saving", [(1, "flat"), (2, "rows"), (3, "flat"), (3, "rows")], ids=str)
def test_any_world_and_cut_reads_what_any_other_wrote(tmp_path, saving):
    ranks(3).run(save, tmp_path, *saving)
    for world, cut in ((1, "rows"), (2, "flat"), (3, "rows"), (3, "flat")):
        results = ranks(3).run(load, tmp_path, world, cut)
        assert results == [(True, 3.0, [4.0, 5.0])] * world + [None] * (3 - world)


def load_with_torch(path):
    mesh = init_device_mesh("cpu", (3,))
    state = {"cut": distribute_tensor(torch.zeros(SHAPE), mesh, [Shard(1)]), "same": torch.zeros(())}
    dcp.load(state, checkpoint_id=path)
    return torch.equal(state["cut"].full_tensor(), full()), state["same"].item()


def save_with_torch(path):
    mesh = init_device_mesh("cpu", (3,))
    own = torch.tensor([4, 5])
    state = {"cut": distribute_tensor(full(), mesh, [Shard(1)]), "same": torch.tensor(3.0), "own": own}
    dcp.save(state, checkpoint_id=path)


def test_torch_reads_what_three_ranks_wrote_and_they_read_what_torch_wrote(tmp_path):
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    ours.mkdir()
    ranks(3).run(save, ours, 3, "flat")
    assert ranks(3).run(load_with_torch, ours) == [(True, 3.0)] * 3
    ranks(3).run(save_with_torch, theirs)
    assert ranks(3).run(load, theirs, 3, "flat") == [(True, 3.0, [4.0, 5.0])] * 3


def said(call, *args):
    began = time.monotonic()
    try:
        call(*args)
    except CheckpointError as error:
        return str(error), time.monotonic() - began
    return "no error", 0.0


def write_with(path, break_rank_1):
    """Write two tensors after ``break_rank_1`` changed what rank 1 does."""
    rank = dist.get_rank()
    tensors = {"cut": flat(full(), rank, 3)[1], "same": replicated(torch.tensor(3.0), rank)}
    undo = break_rank_1(tensors) if rank == 1 else None
    try:
        result = said(DcpStorage().write, path, tensors, None)
    finally:
        if undo is not None:
            undo()
    dist.barrier()  # the group still works: nobody is left inside the write
    return result


def limit_file_size(tensors):
    import resource
    import signal

    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50, old[1]))
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, old)


def own_what_rank_0_owns(tensors):
    tensors["same"] = replicated(torch.tensor(3.0), 0)


def forget_the_boxes(tensors):
    tensors["cut"] = LogicalTensor(SHAPE, torch.float32, ())


def change_the_shape(tensors):
    tensors["same"] = LogicalTensor((1,), torch.float32, ())


def lose_the_memory(tensors):
    tensors["cut"] = LogicalTensor(SHAPE, torch.float32, (Box((2, 2), torch.ones(1, 12)),))


@pytest.mark.parametrize(
    ("break_rank_1", "message"),
    [
        (limit_file_size, "{path} cannot be written: rank 1: File too large. Raise the limit"),
        (own_what_rank_0_owns, "Tensor 'same' of shape [] cannot be written: ranks 0 and 1 both own"),
        (forget_the_boxes, "hold 23 of 35 elements"),
        (change_the_shape, "Tensor 'same' is [1] torch.float32 on rank 1"),
        (lose_the_memory, "rank 1: Box at (2, 2) of shape [1, 12]: it does not lie in tensor 'cut'"),
    ],
)
def test_a_failure_of_one_rank_is_the_error_of_all(tmp_path, break_rank_1, message):
    results = ranks(3).run(write_with, tmp_path, break_rank_1)
    assert len({text for text, _ in results}) == 1
    assert message.format(path=tmp_path) in results[0][0]
    assert max(seconds for _, seconds in results) < 10
    assert not (tmp_path / ".metadata").exists()  # so it is no checkpoint


def write_to_own(path):
    """As ranks whose hosts do not share a file system: rank 2 does not see the directory."""
    mine = path if dist.get_rank() < 2 else path / "elsewhere"
    return said(DcpStorage().write, mine, {"cut": flat(full(), dist.get_rank(), 3)[1]}, None)[0]


def test_a_directory_that_one_rank_does_not_see_is_an_error_before_anything_is_written(tmp_path):
    results = ranks(3).run(write_to_own, tmp_path)
    assert all("rank 2:" in text and "share" in text for text in results)
    assert list(tmp_path.iterdir()) == []


def read_other_shape(path):
    rank = dist.get_rank()
    target = torch.zeros(SHAPE if rank < 2 else (5, 7))
    text, _ = said(DcpStorage().read, path, {"cut": replicated(target, 0)}, None)
    return text, bool(target.any())


def test_a_read_that_one_rank_cannot_do_fills_nothing_anywhere(tmp_path):
    ranks(3).run(save, tmp_path, 3, "flat")
    for text, filled in ranks(3).run(read_other_shape, tmp_path):
        assert "rank 2: Tensor 'cut' of shape [5, 7]" in text and "shape [7, 5]" in text
        assert not filled
    data = Path(tmp_path, "__1_0.distcp")
    os.truncate(data, data.stat().st_size - 1)
    results = ranks(3).run(read_whole, tmp_path)
    assert all("rank 0:" in text and "__1_0.distcp is cut short" in text and not filled for text, filled in results)


def read_whole(path):
    target = torch.zeros(SHAPE)
    tensor = replicated(target, 0) if dist.get_rank() == 0 else LogicalTensor(SHAPE, torch.float32, ())
    text, _ = said(DcpStorage().read, path, {"cut": tensor}, None)
    return text, bool(target.any())
