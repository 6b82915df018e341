"""Descriptors, mappings, forks, and systems that refuse what shm needs."""

import contextlib
import ctypes
import gc
import logging
import os
import resource
import signal
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from shm_ranks import (
    BACKEND,
    bits,
    meet,
    on_new_ranks,
    on_ranks,
    only_shm,
    plugin,
    raised,
    reduced,
    regroup,
    same_bits,
    same_numbers,
    values,
)

from polyscale._torch import all_gather


def open_now():
    gc.collect()
    maps = Path("/proc/self/maps").read_text().splitlines()
    return len(list(Path("/proc/self/fd").iterdir())), len(maps), len([line for line in maps if "memfd:" in line])


def groups_again_and_again(rounds):
    """The default group ends and begins ``rounds`` times; what is open after a tenth of them, and after all."""
    early = None
    for index in range(rounds):
        regroup(BACKEND, prefix=f"round{index}")
        buffer = plugin().allocate(50_000, dtype=torch.float32, device=torch.device("cpu"))
        dist.all_reduce(buffer.fill_(1.0))
        work = dist.all_reduce(torch.ones(10), async_op=True)
        work.wait()
        assert buffer.unique().tolist() == [2.0]
        del buffer, work
        if index == rounds // 5:
            early = open_now()
    late = open_now()
    return early, late


@pytest.mark.parametrize("rounds", [15, pytest.param(50, marks=pytest.mark.long)])
def test_groups_that_end_leave_no_descriptors_and_no_mappings(rounds):
    for early, late in on_new_ranks(2, groups_again_and_again, rounds, timeout=120):
        slack = (8, 60, 0) if BACKEND == "shm" else (1000, 1000, 1000)  # each round keeps a client of the store
        grown = [after - before for before, after in zip(early, late, strict=True)]
        assert all(more <= most for more, most in zip(grown, slack, strict=True)), (early, late)


def buffers_again_and_again():
    before = None
    for index in range(200):
        buffer = plugin().allocate(1_000_000, dtype=torch.float32, device=torch.device("cpu"))
        dist.all_reduce(buffer.fill_(1.0))
        del buffer
        if index == 20:
            before = open_now()
    return before, open_now()


@pytest.mark.long
def test_buffers_that_are_let_go_are_used_again():
    for before, after in on_new_ranks(2, buffers_again_and_again):
        assert after[0] <= before[0] + 2 and after[2] <= before[2] + 1, (before, after)


def forked():
    """A child that ends, a child that computes, a child that wrongly calls a collective; the group goes on."""
    dist.all_reduce(torch.ones(5))
    buffer = plugin().allocate(1000, dtype=torch.float32, device=torch.device("cpu")).fill_(1)
    codes = []
    for what in ("ends", "computes", "exits", "calls"):
        child = os.fork()
        if child == 0:
            _in_child(what, buffer)
        codes.append(_code_of(child))
    dist.all_reduce(buffer)
    work = dist.all_reduce(torch.ones(100_000), async_op=True)
    work.wait()
    return codes, buffer.unique().tolist()


def _in_child(what, buffer):
    code = 0
    signal.alarm(20)
    with contextlib.suppress(BaseException):
        if what == "computes":
            code = 0 if (buffer + 1).unique().tolist() == [2.0] else 1
            del buffer
            gc.collect()
        elif what == "calls":
            code = 7 if raised(lambda: dist.all_reduce(torch.ones(3))) != "nothing was raised" else 8
        elif what == "exits":
            sys.exit(0)  # caught: the worker's own finally must not run in the child
    os._exit(code)


def _code_of(child):
    deadline = time.monotonic() + 25
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "hangs"


@only_shm
def test_a_forked_child_ends_well_and_may_not_call_collectives():
    for codes, found in on_new_ranks(2, forked):
        assert codes == [0, 0, 0, 7]
        assert found == [2.0]


def loader_workers():
    """DataLoader forks workers from a rank whose backend has threads and memory."""
    data = torch.utils.data.TensorDataset(torch.arange(20.0))
    loader = torch.utils.data.DataLoader(data, batch_size=5, num_workers=2)
    total = torch.zeros(1)
    for (batch,) in loader:
        part = batch.sum().view(1)
        dist.all_reduce(part)
        total += part
    return total.item()


def test_workers_of_a_data_loader():
    assert on_new_ranks(2, loader_workers) == [380.0] * 2


def some_of_everything():
    """One of each kind against the oracle; what came out wrong."""
    rank, world = dist.get_rank(), dist.get_world_size()
    wrong = []
    for dtype, numel in ((torch.float32, 300_001), (torch.bfloat16, 3), (torch.float64, 1000)):
        inputs = [values(dtype, numel, each) for each in range(world)]
        tensor, output = inputs[rank].clone(), torch.empty(numel * world, dtype=dtype)
        dist.all_reduce(tensor)
        all_gather(output, inputs[rank], None, async_op=False)
        received = torch.empty_like(tensor)
        works = [dist.isend(inputs[rank], (rank + 1) % world), dist.irecv(received, (rank - 1) % world)]
        for work in works:
            work.wait()
        close = torch.allclose(tensor.double(), reduced("SUM", inputs).double(), rtol=0.02, atol=0.02)
        good = [close, same_bits(output, torch.cat(inputs)), same_bits(received, inputs[rank - 1])]
        wrong += [] if all(good) else [(dtype, numel, good)]
    return wrong


class _Lines(logging.Handler):
    def __init__(self):
        super().__init__(logging.WARNING)
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


def where_files_cannot_grow(limited):
    """RLIMIT_FSIZE of 4 KiB on the ranks of ``limited``, then two groups."""
    if dist.get_rank() in limited:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
    lines = _Lines()
    logging.getLogger("polyscale").addHandler(lines)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        regroup("shm", prefix="limited")
        wrong = some_of_everything()
        second = dist.new_group([0, 1])
        tensor = torch.ones(100_000)
        dist.all_reduce(tensor, group=second)
        buffer = plugin("shm").allocate(100_000, dtype=torch.float32, device=torch.device("cpu")).fill_(1)
        dist.all_reduce(buffer)
    logging.getLogger("polyscale").removeHandler(lines)
    said = [text for text in [*(str(each.message) for each in caught), *lines.lines] if "gloo" in text]
    return wrong, tensor.unique().tolist(), buffer.unique().tolist(), said


@only_shm
@pytest.mark.parametrize("limited", [pytest.param((0, 1), marks=pytest.mark.long), (1,)], ids=["all", "one"])
def test_where_memory_is_refused_gloo_does_it_and_one_warning_says_so(limited):
    found = on_new_ranks(2, where_files_cannot_grow, limited, backend="gloo")
    for wrong, second, buffer, said in found:
        assert wrong == []
        assert second == buffer == [2.0]
        assert len(said) <= 1, said
    texts = [text for *_, said in found for text in said]
    assert texts and all("gloo" in text for text in texts), texts


def hide_memory():
    """Forbid other processes to read this one's memory and descriptors: not dumpable, and no capability to trace."""
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    sets = (ctypes.c_uint32 * 6)()
    assert libc.capget(header, sets) == 0
    for index in range(3):
        sets[index] &= ~(1 << 19)  # CAP_SYS_PTRACE
    assert libc.capset(header, sets) == 0
    assert libc.prctl(4, 0, 0, 0, 0) == 0  # PR_SET_DUMPABLE


def where_memory_cannot_be_read():
    hide_memory()
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        regroup("shm", prefix="hidden")
        wrong = some_of_everything()
        for numel in (1, 70_000, 2_000_000):
            buffer = plugin("shm").allocate(numel, dtype=torch.float32, device=torch.device("cpu"))
            dist.all_reduce(buffer.fill_(1))
            wrong += [] if buffer.unique().tolist() == [2.0] else [("allocated", numel)]
            root, tensor = dist.get_rank() == 0, bits(torch.float32, numel, dist.get_rank())
            dist.broadcast(tensor, 0)
            right = bits(torch.float32, numel, 0)
            wrong += [] if root or same_bits(tensor, right) else [("broadcast", numel)]
    return wrong


@only_shm
def test_where_memory_of_other_processes_cannot_be_read():
    assert on_new_ranks(2, where_memory_cannot_be_read, backend="gloo") == [[], []]


def where_only_some_can_be_read():
    if dist.get_rank() == 1:
        hide_memory()
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        regroup("shm", prefix="half-hidden")
        return some_of_everything()


@pytest.mark.long
@only_shm
def test_where_memory_of_one_rank_cannot_be_read():
    assert on_new_ranks(2, where_only_some_can_be_read, backend="gloo") == [[], []]


def sizes_in_turn():
    """Sizes up and down, so that memory grows and is used again."""
    rank, world = dist.get_rank(), dist.get_world_size()
    for numel in (1, 10, 1000, 100_000, 3_000_000, 1000, 0, 3_000_001, 7):
        inputs = [values(torch.float32, numel, each) for each in range(world)]
        tensor = inputs[rank].clone()
        dist.all_reduce(tensor)
        assert same_numbers(tensor, reduced("SUM", inputs))
    meet("sizes")
    return "well"


@pytest.mark.long
def test_sizes_up_and_down():
    assert on_ranks(2, sizes_in_turn) == ["well"] * 2
