"""Every kernel on every instruction set that this processor has, against float64 and torch's own conversions."""

import platform

import numpy as np
import pytest
import torch

from polyscale import ops
from polyscale_cpu_ops.library import MODULE
from polyscale_cpu_ops.wrappers import Wrappers

SIZES = (0, 1, 7, 8, 9, 15, 17, 1000, 100_003)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
HALF_ULP = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}  # relative
ADAM = {"lr": 0.01, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1, "step": 3, "grad_scale": 0.5}


@pytest.fixture(scope="module")
def extension():
    return ops.load_module(MODULE)


ARM = platform.machine().lower() in ("aarch64", "arm64")


@pytest.fixture(params=["scalar", "neon"] if ARM else ["scalar", "avx2", "avx512"])
def kernels(extension, request):
    """The ops on one instruction set."""
    if request.param not in extension.instruction_sets():
        pytest.skip(f"this processor has no {request.param}")
    assert extension.set_instruction_set(request.param) and extension.instruction_set() == request.param
    yield Wrappers(extension)
    extension.set_instruction_set(extension.instruction_sets()[0])


@pytest.fixture(params=[1, 2])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


class Guarded:
    """A tensor one element inside a larger buffer, whose ends must stay as they are."""

    def __init__(self, values, offset=1):
        self.buffer = torch.full((values.numel() + offset + 1,), 77.0, dtype=values.dtype)
        self.view = self.buffer[offset : offset + values.numel()]
        self.view.copy_(values)
        self.offset = offset

    def check(self):
        ends = torch.cat([self.buffer[: self.offset], self.buffer[self.offset + self.view.numel() :]])
        assert (ends == 77.0).all(), "written outside"


def randoms(size, seed, dtype=torch.float32):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def as_float64(tensor):
    return tensor.detach().double().numpy()


def adam_by_formula(param, exp_avg, exp_avg_sq, grad, options, decoupled, corrected=True):
    """Kingma and Ba 2015, Algorithm 1; Loshchilov and Hutter 2019, Algorithm 2."""
    p, m, v, g = (as_float64(each) for each in (param, exp_avg, exp_avg_sq, grad))
    lr, beta1, beta2, decay, step = (options[key] for key in ("lr", "beta1", "beta2", "weight_decay", "step"))
    g = g * options["grad_scale"]
    if not decoupled:
        g = g + decay * p
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g * g
    first, second = (m / (1 - beta1**step), v / (1 - beta2**step)) if corrected else (m, v)
    decayed = p - lr * decay * p if decoupled else p
    return decayed - lr * first / (np.sqrt(second) + options["eps"]), m, v


@pytest.mark.parametrize(("threads", "size"), [*((1, size) for size in SIZES), (2, SIZES[-1])], indirect=["threads"])
@pytest.mark.parametrize("grad_dtype", DTYPES)
def test_adam_follows_the_formula(kernels, threads, grad_dtype, size):
    for number, copy_dtype in enumerate((None, *DTYPES.values())):
        decoupled, offset = bool(number % 2), number // 2
        param, exp_avg = Guarded(randoms(size, 1), offset), Guarded(randoms(size, 2) * 0.1, offset)
        exp_avg_sq = Guarded(randoms(size, 3).square(), offset)
        grad = Guarded(randoms(size, 4, DTYPES[grad_dtype]), offset)
        copy = None if copy_dtype is None else Guarded(torch.zeros(size, dtype=copy_dtype), offset)
        grad_before = grad.buffer.clone()
        expected = adam_by_formula(param.view, exp_avg.view, exp_avg_sq.view, grad.view, ADAM, decoupled)
        kernels.fused_adam_(
            param.view, exp_avg.view, exp_avg_sq.view, grad.view, copy and copy.view, decoupled=decoupled, **ADAM
        )
        for found, right in zip((param, exp_avg, exp_avg_sq), expected, strict=True):
            np.testing.assert_allclose(as_float64(found.view), right, rtol=3e-6, atol=1e-7)
            found.check()
        assert torch.equal(grad.buffer, grad_before)
        if copy is not None:
            assert torch.equal(copy.view, param.view.to(copy_dtype))
            copy.check()


def test_adam_without_bias_correction(kernels):
    tensors = [randoms(1000, 1), randoms(1000, 2) * 0.1, randoms(1000, 3).square(), randoms(1000, 4)]
    for decoupled in (True, False):
        param, exp_avg, exp_avg_sq, grad = (each.clone() for each in tensors)
        expected = adam_by_formula(*tensors, ADAM, decoupled, corrected=False)
        kernels.fused_adam_(param, exp_avg, exp_avg_sq, grad, decoupled=decoupled, bias_correction=False, **ADAM)
        for found, right in zip((param, exp_avg, exp_avg_sq), expected, strict=True):
            np.testing.assert_allclose(as_float64(found), right, rtol=3e-6, atol=1e-7)


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_adam_is_within_twice_the_error_of_torch_after_1000_steps(kernels, decay):
    def run(start, dtype):
        param = torch.nn.Parameter(randoms(2000, 0).to(dtype))
        step = start(param)
        for number in range(1, 1001):
            param.grad = randoms(2000, number).to(dtype)
            step(number)
        return param.detach().double()

    def by_torch(param):
        optimizer = torch.optim.AdamW([param], lr=1e-3, weight_decay=decay, fused=True)
        return lambda number: optimizer.step()

    def by_kernel(param):
        moments = torch.zeros(2000), torch.zeros(2000)
        return lambda number: kernels.fused_adam_(
            param.detach(), *moments, param.grad, lr=1e-3, weight_decay=decay, step=number
        )

    right = run(by_torch, torch.float64)
    torchs, own = ((run(start, torch.float32) - right).abs() for start in (by_torch, by_kernel))
    for measure in (torch.max, torch.mean):
        assert 0 < measure(own) <= 2 * measure(torchs)


def test_what_is_not_finite_stays_where_it_is(kernels):
    for dtype in DTYPES.values():
        grad = randoms(1000, 1, dtype)
        grad[3], grad[500], grad[999] = float("nan"), float("inf"), -float("inf")
        param, exp_avg, exp_avg_sq, copy = torch.zeros(1000), torch.zeros(1000), torch.zeros(1000), grad.clone()
        kernels.fused_adam_(param, exp_avg, exp_avg_sq, grad, copy, lr=0.1, step=1)
        for tensor in (param, copy):
            assert tensor.isfinite().logical_not().nonzero().flatten().tolist() == [3, 500, 999]


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_every_number_of_16_bits_is_read_as_it_is(kernels, name):
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(DTYPES[name])
    found = torch.zeros(2**16)
    kernels.add_scaled_(found, every, beta=0.0)
    assert torch.equal(found.nan_to_num(nan=1e30), every.float().nan_to_num(nan=1e30))
    assert torch.equal(found.isnan(), every.isnan())


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_rounding_is_to_the_nearest_and_ties_to_even(kernels, name):
    high = torch.arange(2**16, dtype=torch.int32) << 16
    for low in (0, 1, 0x0FFF, 0x1000, 0x1001, 0x2000, 0x3000, 0x7FFF, 0x8000, 0x8001, 0xF000, 0xFFFF):
        numbers = (high | low).view(torch.float32)
        found = torch.zeros(2**16, dtype=DTYPES[name])
        kernels.add_scaled_(found, numbers, beta=0.0)
        right = numbers.to(DTYPES[name])
        assert torch.equal(found.isnan(), numbers.isnan())
        known = numbers.isnan().logical_not()
        assert torch.equal(found[known].view(torch.int16), right[known].view(torch.int16)), hex(low)


@pytest.mark.parametrize("source_dtype", DTYPES)
@pytest.mark.parametrize("target_dtype", DTYPES)
def test_scaled_sums_with_conversion(kernels, threads, target_dtype, source_dtype):
    for size in SIZES:
        for offset, (alpha, beta) in enumerate(((1.0, 1.0), (0.37, 0.0), (-2.5, 0.75))):
            target = Guarded(randoms(size, 1, DTYPES[target_dtype]), offset)
            source = Guarded(randoms(size, 2, DTYPES[source_dtype]), offset)
            right = alpha * as_float64(source.view) + beta * as_float64(target.view)
            scale = abs(alpha * as_float64(source.view)) + abs(beta * as_float64(target.view))
            kernels.add_scaled_(target.view, source.view, alpha, beta)
            bound = scale * (HALF_ULP[DTYPES[target_dtype]] + 2.0**-22) + 1e-7
            assert (abs(as_float64(target.view) - right) <= bound).all()
            target.check()


def test_a_target_that_is_not_kept_is_not_read(kernels):
    target = torch.full((1003,), float("nan"))
    kernels.add_scaled_(target, torch.ones(1003), 2.0, 0.0)
    assert (target == 2.0).all()


def test_a_tensor_can_be_scaled_in_place(kernels):
    for dtype in DTYPES.values():
        tensor = randoms(1003, 1, dtype)
        right = tensor * 0.5
        kernels.add_scaled_(tensor, tensor, alpha=0.5, beta=0.0)
        assert torch.equal(tensor, right)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_fill(kernels, threads, dtype):
    for size in SIZES:
        for offset, value in enumerate((0.1, -3.0, 1e30, float("nan"))):
            target = Guarded(randoms(size, 1, dtype), offset)
            kernels.fill_(target.view, value)
            assert torch.equal(target.view.nan_to_num(5), torch.full((size,), value).to(dtype).nan_to_num(5))
            target.check()


@pytest.mark.parametrize("dtype", [*DTYPES.values(), torch.float64], ids=[*DTYPES, "fp64"])
def test_sums_of_squares(kernels, threads, dtype):
    for offset in (0, 1):
        tensors = [Guarded(randoms(size, size).to(dtype), offset).view for size in SIZES]
        total, finite = kernels.sum_of_squares(tensors)
        right = sum(np.sum(as_float64(tensor) ** 2) for tensor in tensors)
        assert (total.dtype, total.shape, finite.dtype, finite.shape) == (torch.float64, (), torch.bool, ())
        assert total.item() == pytest.approx(right, rel=1e-12) and finite.item() is True
        for place in (0, 7, -1):
            for value in (float("nan"), float("inf"), -float("inf")):
                spoiled = [*tensors[:-1], tensors[-1].clone()]
                spoiled[-1][place] = value
                assert kernels.sum_of_squares(spoiled)[1].item() is False


def test_sums_of_many_dtypes_and_of_nothing(kernels):
    tensors = [randoms(1000, number).to(dtype) for number, dtype in enumerate((*DTYPES.values(), torch.float64))]
    right = sum(np.sum(as_float64(tensor) ** 2) for tensor in tensors)
    assert kernels.sum_of_squares(tensors)[0].item() == pytest.approx(right, rel=1e-12)
    total, finite = kernels.sum_of_squares([torch.empty(0), torch.empty(0, 3)])
    assert (total.item(), finite.item()) == (0.0, True)


def test_squares_neither_overflow_nor_vanish(kernels):
    for value in (3e38, 1e-45):
        total, finite = kernels.sum_of_squares([torch.full((1000,), value)])
        right = 1000 * float(torch.tensor(value)) ** 2
        assert total.item() == pytest.approx(right, rel=1e-12) and finite.item() is True
    total, finite = kernels.sum_of_squares([torch.full((1000,), 1e200, dtype=torch.float64)])
    assert (total.item(), finite.item()) == (float("inf"), True)


def test_the_number_of_threads_changes_no_bit(kernels):
    def run(count):
        torch.set_num_threads(count)
        tensors = [randoms(200_003, 1), torch.zeros(200_003), torch.zeros(200_003)]
        copy = torch.zeros(200_003, dtype=torch.bfloat16)
        kernels.fused_adam_(*tensors, randoms(200_003, 2), copy, lr=0.1, step=1)
        return [*tensors, copy, *kernels.sum_of_squares(tensors)]

    before = torch.get_num_threads()
    try:
        one, several = run(1), run(5)
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(one, several, strict=True))
