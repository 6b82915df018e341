"""The CPU accelerator: memory, random numbers, streams, the report."""

import os
import subprocess
import sys
import textwrap

import pytest
import torch

from polyscale.errors import UnsupportedError
from polyscale_cpu import host, process
from polyscale_cpu.accelerator import CpuAccelerator

# The kernel counts pages per processor and adds them up now and then.
SLACK = 4 << 20


def test_cpu_is_available_with_one_device_that_every_index_names():
    cpu = CpuAccelerator()
    assert cpu.is_available()
    assert cpu.why_unavailable() == ""
    assert cpu.device_count() == 1
    assert cpu.device() == cpu.device(0) == cpu.device(5) == torch.device("cpu")
    cpu.set_device(3)
    cpu.synchronize()
    with pytest.raises(UnsupportedError, match="cpu device -1"):
        cpu.device(-1)


def test_memory_follows_an_allocation_and_the_peak_can_be_reset():
    cpu = CpuAccelerator()
    size = 64 << 20
    before = cpu.memory()
    held = torch.ones(size, dtype=torch.uint8)
    during = cpu.memory()
    assert during.allocated - before.allocated > 0.9 * size
    assert during.peak >= during.allocated
    del held
    cpu.empty_cache()
    after = cpu.memory()
    assert after.peak > during.allocated - SLACK
    assert after.allocated < during.allocated - 0.9 * size
    if os.access("/proc/self/clear_refs", os.W_OK):
        cpu.reset_peak_memory()
        assert cpu.memory().peak < during.allocated - 0.9 * size
    assert before.allocated < before.total


def test_memory_works_without_proc_and_without_resource(monkeypatch):
    class NoFiles:
        def __init__(self, path):
            pass

        def read_text(self):
            raise FileNotFoundError

    monkeypatch.setattr(process, "Path", NoFiles)
    resident, peak = process.memory()
    assert resident == peak > 10 << 20
    monkeypatch.setitem(sys.modules, "resource", None)
    assert process.memory() == (0, 0)


def test_random_state_is_that_of_torch():
    cpu = CpuAccelerator()
    cpu.manual_seed(7)
    expected = torch.rand(3, generator=torch.Generator().manual_seed(7))
    state = cpu.rng_state()
    assert torch.equal(torch.rand(3), expected)
    cpu.set_rng_state(state)
    assert torch.equal(torch.rand(3), expected)


def test_streams_and_events_do_nothing():
    cpu = CpuAccelerator()
    stream, event = cpu.new_stream(), cpu.new_event()
    with stream:
        event.record(stream)
    stream.wait_stream(cpu.new_stream())
    stream.synchronize()
    event.synchronize()


@pytest.mark.parametrize("name", ["fp64", "fp32", "bf16", "fp16"])
def test_declared_dtypes_multiply(name):
    assert name in CpuAccelerator.capabilities.dtypes
    dtype = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[name]
    ones = torch.ones(4, 4, dtype=dtype)
    assert torch.equal(ones @ ones, 4 * ones)


def test_report_tells_processor_memory_and_compiler(monkeypatch):
    rows = {row.name: row for row in CpuAccelerator().diagnose()}
    assert {"processor", "cores", "memory", "C++ compiler"} <= set(rows)
    monkeypatch.setattr(host, "_COMPILERS", ())
    monkeypatch.delenv("CXX", raising=False)
    assert CpuAccelerator().toolchain() is None
    assert not {row.name: row for row in CpuAccelerator().diagnose()}["C++ compiler"].ok


def test_activation_keeps_large_blocks_off_the_page_fault_path():
    """After activation, freeing and allocating 31 MiB again faults no page in (mallopt(3)); before, every page."""
    pytest.importorskip("resource")
    if "CS_GNU_LIBC_VERSION" not in getattr(os, "confstr_names", ()):
        pytest.skip("glibc only")
    code = """
        import ctypes, resource
        from polyscale_cpu import process
        libc = ctypes.CDLL(None)
        libc.malloc.restype = ctypes.c_void_p
        def cycles():
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            for _ in range(10):
                block = libc.malloc(ctypes.c_size_t(31 << 20))
                libc.memset(ctypes.c_void_p(block), 1, ctypes.c_size_t(31 << 20))
                libc.free(ctypes.c_void_p(block))
            return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
        process.keep_freed_memory()
        cycles()
        print(cycles())
    """
    env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60, env=env, check=True
    )
    pages_of_one_block = (31 << 20) // os.sysconf("SC_PAGE_SIZE")
    assert int(done.stdout) < pages_of_one_block / 10
