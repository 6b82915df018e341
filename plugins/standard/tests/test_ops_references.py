"""The references of the ops, against torch.optim and float64, on any strides, and on a device without kernels."""

import pytest
import torch

from polyscale import ops
from polyscale.discovery import load
from polyscale.errors import PolyscaleError
from polyscale.interfaces.op import OpLibrary
from polyscale_standard.ops.adam import fused_adam_
from polyscale_standard.ops.elementwise import add_scaled_, fill_
from polyscale_standard.ops.sums import sum_of_squares


def randoms(shape, seed, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("decoupled", [False, True])
def test_adam_equals_torch(decoupled, decay, maximize):
    expected = torch.nn.Parameter(randoms((5, 3), 0))
    options = {"lr": 0.1, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": decay, "maximize": maximize}
    optimizer = (torch.optim.AdamW if decoupled else torch.optim.Adam)([expected], foreach=False, **options)
    param, exp_avg, exp_avg_sq = randoms((5, 3), 0), torch.zeros(5, 3).double(), torch.zeros(5, 3).double()
    copy = torch.zeros(5, 3, dtype=torch.bfloat16)
    for step in range(1, 6):
        grad = randoms((5, 3), step)
        expected.grad = grad.clone()
        optimizer.step()
        fused_adam_(
            param, exp_avg, exp_avg_sq, grad / 8, copy, lr=0.1, beta1=0.8, beta2=0.95, eps=1e-6, weight_decay=decay,
            decoupled=decoupled, step=step, grad_scale=-8.0 if maximize else 8.0,
        )  # fmt: skip
    torch.testing.assert_close(param, expected.detach(), rtol=1e-13, atol=1e-14)
    state = optimizer.state[expected]
    torch.testing.assert_close(exp_avg, state["exp_avg"], rtol=1e-13, atol=1e-14)
    torch.testing.assert_close(exp_avg_sq, state["exp_avg_sq"], rtol=1e-13, atol=1e-14)
    assert torch.equal(copy, param.bfloat16())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_adam_over_narrow_parameters_computes_in_fp32_as_torch_does(dtype):
    """In fp16 eps and the squares of small gradients would be zero, and an update 0 / 0."""
    expected = torch.nn.Parameter(torch.ones(100, dtype=dtype))
    optimizer = torch.optim.AdamW([expected], lr=0.01, fused=True)
    param, exp_avg, exp_avg_sq = torch.ones(100, dtype=dtype), torch.zeros(100).to(dtype), torch.zeros(100).to(dtype)
    for step in range(1, 4):
        expected.grad = randoms(100, step, dtype) * 1e-3
        optimizer.step()
        fused_adam_(param, exp_avg, exp_avg_sq, expected.grad, lr=0.01, weight_decay=0.01, step=step)
    torch.testing.assert_close(param, expected.detach(), rtol=2 * torch.finfo(dtype).eps, atol=0)


def test_adam_takes_any_strides_and_gradient_dtype():
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        grad = randoms((4, 6), 1, dtype)
        whole = [torch.zeros(4, 6) for _ in range(3)]
        strided = [torch.zeros(6, 8).t()[:4] for _ in range(3)]
        fused_adam_(*whole, grad, lr=0.1, step=1)
        fused_adam_(*strided, grad, lr=0.1, step=1)
        assert all(torch.equal(one, other) for one, other in zip(whole, strided, strict=True))
        fine = [torch.zeros(4, 6).double() for _ in range(3)]
        fused_adam_(*fine, grad, lr=0.1, step=1)
        torch.testing.assert_close(whole[0].double(), fine[0], rtol=1e-5, atol=1e-8)


def test_sums_of_squares_in_fp64():
    tensors = [randoms((3, 5), 0), randoms(7, 1, torch.bfloat16), torch.empty(0), randoms((4, 4), 2, torch.float32).t()]
    total, finite = sum_of_squares(tensors)
    right = sum((tensor.double() ** 2).sum() for tensor in tensors)
    torch.testing.assert_close(total, right, rtol=1e-14, atol=0)
    assert (total.dtype, finite.item()) == (torch.float64, True)
    assert sum_of_squares([torch.full((2,), 3e38)])[0].item() == pytest.approx(2 * 9e76, rel=1e-6)
    for value in (float("nan"), float("inf")):
        assert sum_of_squares([*tensors, torch.tensor([1.0, value])])[1].item() is False


def test_scaled_sums_round_once():
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        target, source = randoms(100, 1, dtype), randoms(100, 2, torch.bfloat16)
        right = (0.75 * target.double() - 2.5 * source.double()).to(dtype)
        add_scaled_(target, source, -2.5, 0.75)
        torch.testing.assert_close(target, right)
    target = torch.full((3,), float("nan"))
    add_scaled_(target, target.new_ones(3), 2.0, 0.0)
    assert target.tolist() == [2.0, 2.0, 2.0]


def test_a_value_that_does_not_fit_becomes_infinite():
    target = torch.zeros(3, dtype=torch.float16)
    fill_(target, 1e30)
    assert target.tolist() == [float("inf")] * 3
    fill_(target, 0.1)
    assert torch.equal(target, torch.full((3,), 0.1, dtype=torch.float16))


def test_a_number_beyond_the_range_becomes_infinite():
    target = torch.ones(3)
    fill_(target, -1e300)
    assert target.tolist() == [-float("inf")] * 3
    target.fill_(1.0)
    add_scaled_(target, torch.ones(3), 1.0, 1e300)
    assert target.tolist() == [float("inf")] * 3


def test_sums_of_squares_take_eight_bits():
    narrow = torch.tensor([1.0, 2.0]).to(torch.float8_e4m3fn)
    assert [each.item() for each in sum_of_squares([narrow])] == [5.0, True]
    assert sum_of_squares([torch.tensor([float("nan")]).to(torch.float8_e4m3fn)])[1].item() is False


def test_an_empty_slice_shares_no_memory():
    buffer = torch.ones(4)
    add_scaled_(buffer[2:2], buffer[2:2].double())
    fused_adam_(buffer[2:2], buffer[1:1], buffer[3:3], buffer[2:2], lr=1.0, step=1)


def test_a_device_without_kernels_runs_the_reference():
    assert isinstance(load("op", "standard"), OpLibrary)
    meta = [torch.empty(4, device="meta") for _ in range(4)]
    ops.use("fused_adam_", "meta")(*meta, lr=0.1, step=1)
    total, finite = ops.use("sum_of_squares", "meta")(meta)
    assert (total.device.type, total.dtype, finite.dtype) == ("meta", torch.float64, torch.bool)
    ops.use("add_scaled_", "meta")(meta[0], meta[1])
    ops.use("fill_", "meta")(meta[0], 1.0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: fused_adam_(x, x.clone(), x.clone(), x.clone()[:2], lr=1.0, step=1), r"grad of shape \(2,\)"),
        (lambda x: fused_adam_(x, x, x.clone(), x.clone(), lr=1.0, step=1), "param and exp_avg share memory"),
        (lambda x: fused_adam_(x, x.clone(), x.clone(), x.clone(), lr=1.0, step=0), "step=0"),
        (lambda x: fused_adam_(x, x.clone(), x.double(), x.clone(), lr=1.0, step=1), "exp_avg_sq of dtype"),
        (lambda x: add_scaled_(x, x.int()), "source of dtype torch.int32"),
        (lambda x: fill_(x.bool(), 1.0), "target of dtype torch.bool"),
        (lambda x: sum_of_squares([]), "one or more"),
        (lambda x: sum_of_squares([x, x.to("meta")]), r"tensors\[1\] on meta"),
    ],
    ids=["shape", "overlap", "step", "dtype", "integers", "bool", "nothing", "devices"],
)
def test_a_wrong_argument_is_named(call, message):
    with pytest.raises(PolyscaleError, match=message):
        call(torch.ones(4))
