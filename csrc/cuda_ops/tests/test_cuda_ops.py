"""CUDA kernels: they compile where nvcc is; on a GPU they agree with the references."""

import pytest
import torch

from polyscale import ops
from polyscale.discovery import load
from polyscale_cuda_ops.library import MODULE, OPS, CudaOps
from polyscale_standard.ops import adam, elementwise, sums

SIZES = (0, 1, 31, 257, 1000, 100_003)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def test_every_op_of_the_library_has_a_reference():
    declared = {op.name for op in load("op", "standard").ops()}
    assert {kernel.op for kernel in CudaOps().kernels()} == set(OPS) <= declared
    assert {kernel.module for kernel in CudaOps().kernels()} == {MODULE.name}


def test_it_compiles_where_there_is_a_compiler():
    if load("accelerator", "cuda").toolchain() is None:
        pytest.skip("nvcc is not installed")
    extension = ops.load_module(MODULE)
    assert extension.partial_count(0) == 0 and extension.partial_count(1) == 1
    assert extension.partial_count(10**12) == extension.partial_count(10**11) > 100
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match=r"(?i)driver|device"):
            extension.fill(256, 0, 1, 0.0, 0)


@pytest.fixture(scope="module")
def used():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    ops.load_module(MODULE)  # or say why it cannot be built
    return {name: ops.use(name, "cuda") for name in OPS}


def randoms(size, seed, dtype=torch.float32):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to("cuda", dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("offset", [0, 1])
def test_adam_agrees_with_the_reference(used, size, offset):
    for number, (grad_dtype, copy_dtype) in enumerate((g, c) for g in DTYPES for c in (None, *DTYPES)):
        grad = randoms(size + offset, 9, grad_dtype)[offset:]
        found, right = ([randoms(size + offset, seed)[offset:] for seed in (1, 2)] for _ in range(2))
        for values in (found, right):
            values.append(torch.rand_like(values[0]).fill_(0.3))
            values.append(None if copy_dtype is None else torch.zeros(size, dtype=copy_dtype, device="cuda"))
        settings = {"lr": 0.01, "weight_decay": 0.1, "step": 3, "grad_scale": 0.5, "decoupled": number % 2 == 0}
        used["fused_adam_"](*found[:3], grad, found[3], **settings)
        adam.fused_adam_(*right[:3], grad, right[3], **settings)
        for one, other in zip(found[:3], right[:3], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)
        if copy_dtype is not None:
            assert torch.equal(found[3], found[0].to(copy_dtype))


@pytest.mark.gpu
def test_the_others_agree_with_the_references(used):
    for size in SIZES:
        for target_dtype in DTYPES:
            for source_dtype in DTYPES:
                for alpha, beta in ((1.0, 1.0), (0.37, 0.0), (-2.5, 0.75)):
                    found, right = (randoms(size, 1, target_dtype) for _ in range(2))
                    used["add_scaled_"](found, randoms(size, 2, source_dtype), alpha, beta)
                    elementwise.add_scaled_(right, randoms(size, 2, source_dtype), alpha, beta)
                    torch.testing.assert_close(found, right)
            used["fill_"](found, 0.3)
            assert torch.equal(found, torch.full_like(found, 0.3))
    tensors = [randoms(size, size, dtype) for size in SIZES for dtype in (*DTYPES, torch.float64)]
    total, finite = used["sum_of_squares"](tensors)
    torch.testing.assert_close(total, sums.sum_of_squares(tensors)[0], rtol=1e-12, atol=0)
    assert finite.item() is True and total.device.type == "cuda"
    for value in (float("nan"), float("inf")):
        tensors[-1][5] = value
        assert used["sum_of_squares"](tensors)[1].item() is False


@pytest.mark.gpu
def test_work_is_queued_on_the_current_stream(used):
    tensor = torch.zeros(1 << 24, device="cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        used["fill_"](tensor, 2.0)
    assert not stream.query()
    torch.cuda.current_stream().wait_stream(stream)
    assert tensor.sum().item() == 2.0 * (1 << 24)
