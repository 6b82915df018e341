"""The CUDA accelerator on a CUDA device."""

import pytest
import torch

from polyscale.errors import UnsupportedError
from polyscale_cuda.accelerator import CudaAccelerator

pytestmark = pytest.mark.gpu


@pytest.fixture
def cuda():
    made = CudaAccelerator()
    if not made.is_available():
        pytest.skip(made.why_unavailable())
    made.activate()
    made.set_device(0)
    return made


def test_devices_are_counted_and_an_index_out_of_range_names_the_count(cuda):
    count = cuda.device_count()
    assert count == torch.cuda.device_count()
    assert cuda.device(0) == torch.device("cuda", 0)
    with pytest.raises(UnsupportedError) as caught:
        cuda.device(count)
    assert f"{count} device" in caught.value.why


def test_memory_counts_what_is_allocated(cuda):
    cuda.empty_cache()
    before = cuda.memory()
    cuda.reset_peak_memory()
    held = torch.empty(8 << 20, dtype=torch.uint8, device=cuda.device())
    during = cuda.memory()
    assert during.allocated - before.allocated == held.numel()
    del held
    assert cuda.memory().peak == during.allocated
    assert before.total > during.reserved


def test_random_state_is_restored(cuda):
    cuda.manual_seed(3)
    state = cuda.rng_state()
    assert state.device.type == "cpu"
    first = torch.rand(4, device=cuda.device())
    cuda.set_rng_state(state)
    assert torch.equal(torch.rand(4, device=cuda.device()), first)


def test_streams_and_events_order_work(cuda):
    stream, event = cuda.new_stream(), cuda.new_event()
    with stream:
        made = torch.ones(1 << 20, device=cuda.device()) * 2
        event.record()
    event.synchronize()
    stream.synchronize()
    cuda.synchronize()
    assert made.sum().item() == 2 << 20


@pytest.mark.parametrize("name", ["fp64", "fp32", "bf16", "fp16"])
def test_declared_dtypes_multiply(cuda, name):
    if name not in cuda.capabilities.dtypes:
        pytest.skip("not declared")
    dtype = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[name]
    ones = torch.ones(16, 16, dtype=dtype, device=cuda.device())
    assert torch.equal((ones @ ones).cpu(), torch.full((16, 16), 16, dtype=dtype))


def test_report_names_device_and_driver(cuda):
    rows = {row.name: row for row in cuda.diagnose()}
    assert torch.cuda.get_device_name(0) in rows["devices"].value
    assert rows["driver"].ok
