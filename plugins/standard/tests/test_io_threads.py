"""Threaded I/O against plain file reads, and what goes wrong with files, memory and arguments."""

import gc
import os
import stat
import sys
import threading
import weakref
from pathlib import Path

import pytest
import torch

from polyscale import PluginContext
from polyscale.errors import ConfigError, PolyscaleError, UnsupportedError
from polyscale.interfaces.io import FileIO
from polyscale_standard.io import ThreadsIO, ThreadsPlugin
from polyscale_standard.io.transfer import OpenFile

DTYPES = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
]


@pytest.fixture
def io():
    made = ThreadsIO(chunk_bytes=1000)
    yield made
    made.close()


def counting(size):
    return torch.arange(size, dtype=torch.int64).to(torch.uint8)


def threads_of_io():
    return [thread for thread in threading.enumerate() if thread.name.startswith("polyscale-io")]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_moves_by_its_bytes(io, tmp_path, dtype):
    raw = torch.randint(0, 2, (3, 16), dtype=torch.uint8)
    tensor = raw.view(dtype)
    assert io.write(tensor, tmp_path / "x") == 48
    assert (tmp_path / "x").read_bytes() == bytes(raw.reshape(-1).tolist())
    back = torch.empty_like(tensor)
    assert io.read(back, str(tmp_path / "x")) == 48
    assert torch.equal(back.view(torch.uint8), raw)


def test_scalars_and_empty_tensors(io, tmp_path):
    scalar, back = torch.tensor(2.5, dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    assert io.write(scalar, tmp_path / "x") == io.read(back, tmp_path / "x") == 8
    assert back.item() == 2.5
    assert io.write(torch.empty(0, 4), tmp_path / "empty") == 0
    assert (tmp_path / "empty").read_bytes() == b""
    assert io.read(torch.empty(0), tmp_path / "empty") == 0
    assert io.write_async(torch.empty(0), tmp_path / "x", 4).wait() == 0
    assert (tmp_path / "x").stat().st_size == 8


@pytest.mark.parametrize("size", [999, 1000, 1001, 10_007])
def test_large_transfers_are_cut_into_chunks_and_come_out_whole(io, tmp_path, size):
    tensor = counting(size)
    assert io.write_async(tensor, tmp_path / "x", 7).wait() == size
    assert (tmp_path / "x").read_bytes() == bytes(7) + bytes(tensor.tolist())
    back = torch.zeros(size - 100, dtype=torch.uint8)
    assert io.read_async(back, tmp_path / "x", 57).wait() == size - 100
    assert torch.equal(back, tensor[50:-50])


def test_writing_into_a_file_leaves_the_rest_of_it(io, tmp_path):
    (tmp_path / "x").write_bytes(b"abcdefgh")
    io.write(torch.tensor([88, 89], dtype=torch.uint8), tmp_path / "x", 3)
    assert (tmp_path / "x").read_bytes() == b"abcXYfgh"


def test_without_positional_calls_chunks_from_many_threads_come_out_whole(tmp_path):
    data = bytearray(os.urandom(50_000))

    def move_in_threads(file, view):
        movers = [threading.Thread(target=file.move, args=(view[i : i + 777], i)) for i in range(0, len(view), 777)]
        for mover in movers:
            mover.start()
        for mover in movers:
            mover.join()
        file.close()

    path = str(tmp_path / "x")
    move_in_threads(OpenFile(path, "write", 5, len(data), positional=False), memoryview(data))
    assert Path(path).read_bytes() == bytes(5) + data
    back = bytearray(len(data))
    move_in_threads(OpenFile(path, "read", 5, len(data), positional=False), memoryview(back))
    assert back == data


def test_many_operations_at_once_and_one_wait_for_all(io, tmp_path):
    tensors = [torch.full((5000,), i, dtype=torch.uint8) for i in range(20)]
    for i, tensor in enumerate(tensors):
        io.write_async(tensor, tmp_path / "x", i * 5000)
    assert io.wait() == 20
    assert io.wait() == 0
    assert (tmp_path / "x").read_bytes() == b"".join(bytes([i]) * 5000 for i in range(20))


def test_a_tensor_is_held_until_wait_and_no_longer(io, tmp_path):
    tensor = torch.ones(100_000)
    alive = weakref.ref(tensor)
    work = io.write_async(tensor, tmp_path / "x")
    del tensor
    gc.collect()
    assert alive() is not None
    assert work.wait() == 400_000
    gc.collect()
    assert alive() is None
    assert (tmp_path / "x").read_bytes() == b"\x00\x00\x80\x3f" * 100_000


def test_memory_under_way_is_refused_to_a_second_operation(io, tmp_path):
    memory = torch.zeros(4000, dtype=torch.uint8)
    work = io.write_async(memory[1000:2000], tmp_path / "x")
    for overlapping in (memory, memory[1999:3000], memory[:1001], memory[1200:1300]):
        for start in (io.read, io.write, io.read_async, io.write_async):
            with pytest.raises(PolyscaleError, match=r"overlaps a write of 1000 bytes .*under way.*wait\(\)"):
                start(overlapping, tmp_path / "y")
    assert not (tmp_path / "y").exists()
    io.write(memory[2000:], tmp_path / "y")  # beside it
    io.write(memory[1500:1500], tmp_path / "y")  # no byte of it
    work.wait()
    io.write(memory, tmp_path / "y")


def test_a_short_file_is_an_error_with_expected_and_actual_size(io, tmp_path):
    (tmp_path / "x").write_bytes(bytes(30))
    tensor = torch.zeros(10)
    with pytest.raises(PolyscaleError, match=rf"Reading 40 bytes from {tmp_path}/x at byte 8.*Expected 40.*holds 22"):
        io.read(tensor, tmp_path / "x", 8)
    with pytest.raises(PolyscaleError, match=r"Expected 40 bytes, but the file holds 0 there \(it ends at byte 30\)"):
        io.read(tensor, tmp_path / "x", 100)
    work = io.read_async(tensor, tmp_path / "x", 8)
    with pytest.raises(PolyscaleError, match="Expected 40"):
        work.wait()
    with pytest.raises(PolyscaleError, match="Expected 40"):
        work.wait()
    io.write(tensor, tmp_path / "x")  # its memory is free again


def test_a_file_cut_after_opening_is_an_error_too(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(bytes(100))
    file = OpenFile(str(path), "read", 0, 100)
    os.truncate(path, 60)
    with pytest.raises(PolyscaleError, match="Expected 100 bytes, but the file holds 60"):
        file.move(memoryview(bytearray(100)), 0)
    file.close()


def test_a_missing_file_or_folder_is_an_error_at_wait(io, tmp_path):
    with pytest.raises(PolyscaleError, match=f"{tmp_path}/none.*No such file.*Check the path"):
        io.read(torch.zeros(2), tmp_path / "none")
    work = io.write_async(torch.zeros(2), tmp_path / "none" / "x")
    with pytest.raises(PolyscaleError, match=f"{tmp_path}/none/x.*No such file"):
        work.wait()
    with pytest.raises(PolyscaleError, match="Is a directory"):
        io.write(torch.zeros(2), tmp_path)
    with pytest.raises(PolyscaleError, match="null"):
        io.write(torch.zeros(2), "a\0b")


@pytest.mark.skipif(not hasattr(os, "seteuid"), reason="permissions are POSIX")
def test_a_file_without_permission_is_an_error(io, tmp_path):
    (tmp_path / "x").write_bytes(bytes(8))
    (tmp_path / "x").chmod(stat.S_IWUSR)
    me = os.geteuid()
    if me == 0:  # the superuser may read everything, so be nobody for a moment
        os.seteuid(65534)
    try:
        with pytest.raises(PolyscaleError, match=r"Permission denied.*permissions"):
            io.read(torch.zeros(2), tmp_path / "x")
    finally:
        os.seteuid(me)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_full_disk_is_an_error(io):
    for size in (10, 100_000):
        with pytest.raises(
            PolyscaleError, match=r"/dev/full.*No space left on device, at byte \d+ .*bytes are free.*Free space"
        ):
            io.write(torch.zeros(size), "/dev/full")


@pytest.mark.skipif(sys.platform == "win32", reason="limits on file sizes are POSIX")
def test_a_file_that_may_not_grow_is_an_error_and_not_a_signal(io, tmp_path):
    import resource

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        with pytest.raises(PolyscaleError, match=r"File too large, at byte 10\d{5} .*ulimit -f"):
            io.write(torch.zeros(1 << 20, dtype=torch.uint8), tmp_path / "x", 500_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_a_pipe_nobody_serves_is_an_error_and_not_a_hang(io, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for start in (io.read, io.write):
        with pytest.raises(PolyscaleError, match="regular file"):
            start(torch.zeros(2), tmp_path / "pipe")


def test_wait_finishes_everything_and_raises_the_first_error(io, tmp_path):
    io.write_async(torch.zeros(10), tmp_path / "none" / "first")
    io.write_async(torch.zeros(10), tmp_path / "good")
    io.write_async(torch.zeros(10), tmp_path / "none" / "second")
    with pytest.raises(PolyscaleError, match="none/first"):
        io.wait()
    assert (tmp_path / "good").stat().st_size == 40
    assert io.wait() == 0


def test_close_waits_ends_the_threads_and_may_be_called_again(tmp_path):
    io = ThreadsIO(chunk_bytes=1000)
    assert not threads_of_io()
    io.write_async(torch.zeros(100_000), tmp_path / "x")
    assert threads_of_io()
    io.close()
    io.close()
    assert (tmp_path / "x").stat().st_size == 400_000
    assert not threads_of_io()
    with pytest.raises(PolyscaleError, match="closed"):
        io.read(torch.zeros(1), tmp_path / "x")


def test_close_reports_an_error_nobody_waited_for_and_still_ends_the_threads(tmp_path):
    io = ThreadsIO()
    io.write_async(torch.zeros(1), tmp_path / "none" / "x")
    io.write_async(torch.zeros(1), tmp_path / "y")
    with pytest.raises(PolyscaleError, match="none/x"):
        io.close()
    assert not threads_of_io()
    io.close()


def test_files_are_closed_when_done_not_when_waited_for(io, tmp_path):
    if not Path("/proc/self/fd").exists():
        pytest.skip("this system does not list open files")
    works = [io.write_async(torch.zeros(10), tmp_path / f"x{i}") for i in range(50)]
    for future in [future for work in works for future in work._futures]:
        future.result()
    assert not [fd for fd in Path("/proc/self/fd").iterdir() if str(tmp_path) in os.path.realpath(fd)]
    assert io.wait() == 50


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.zeros(4, 4).t()[1:], "not contiguous.*contiguous()"),
        (torch.zeros(1).expand(3), "not contiguous"),
        (torch.zeros(3, device="meta"), "on meta.*host memory only.*cpu()"),
        (torch.eye(2).to_sparse(), "no single piece of memory"),
        (torch.zeros(2, dtype=torch.complex64).conj(), "lazily conjugated"),
    ],
    ids=["transposed", "expanded", "meta", "sparse", "conjugated"],
)
def test_tensors_without_plain_host_memory_are_refused_at_once(io, tmp_path, tensor, message):
    for start in (io.read, io.write, io.read_async, io.write_async):
        with pytest.raises(UnsupportedError, match=message):
            start(tensor, tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_wrong_arguments_are_refused_at_once(io, tmp_path):
    for offset in (-1, 1.5, True):
        with pytest.raises(PolyscaleError, match=f"offset={offset}"):
            io.write_async(torch.zeros(1), tmp_path / "x", offset)
    with pytest.raises(PolyscaleError, match="path=3"):
        io.write_async(torch.zeros(1), 3)
    with pytest.raises(PolyscaleError, match="Only tensors"):
        io.write_async([1.0], tmp_path / "x")


def test_the_plugin_takes_its_options_and_refuses_others():
    made = ThreadsPlugin().polyscale_io(PluginContext("threads", options={"threads": 2, "chunk_bytes": 4096}))
    assert isinstance(made, FileIO)
    assert (made.name, made.is_available(), made.why_unavailable()) == ("threads", True, "")
    for options, message in (
        ({"thread": 2}, "Did you mean 'threads'"),
        ({"threads": 0}, "threads=0.*positive"),
        ({"chunk_bytes": "8M"}, "chunk_bytes='8M'"),
    ):
        with pytest.raises(ConfigError, match=message):
            ThreadsPlugin().polyscale_io(PluginContext("threads", options=options))
