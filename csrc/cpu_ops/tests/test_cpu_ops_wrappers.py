"""The ops as torch calls them: dispatch, what goes to the reference, wrong arguments, threads, forks."""

import os
import signal
import subprocess
import sys
import threading
import time
import warnings

import pytest
import torch

from polyscale import ops
from polyscale.errors import PolyscaleError
from polyscale_cpu_ops.library import MODULE, OPS
from polyscale_standard.ops import adam, elementwise, sums


@pytest.fixture(scope="module")
def used():
    """The ops, each with its kernel."""
    ops.load_module(MODULE)  # or say why it cannot be built
    return {name: ops.use(name, "cpu") for name in OPS}


def state(size=1000, dtype=torch.float32):
    generator = torch.Generator().manual_seed(size)
    param, grad = (torch.randn(size, generator=generator).to(dtype) for _ in range(2))
    return param, torch.zeros_like(param), torch.zeros_like(param), grad


def test_the_kernels_are_what_torch_calls(used):
    assert sorted(used) == sorted(OPS)
    for name in OPS:
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"polyscale::{name}", "CPU")


def test_the_first_use_imports_nothing_that_it_has_no_need_of(used):
    """What it takes is measured by benchmarks/kernel_builds.py: most of it is imports."""
    code = (
        "import sys, torch\nknown = set(sys.modules)\nfrom polyscale import ops\nops.use('fused_adam_', 'cpu')\n"
        "print(*sorted(set(sys.modules) - known))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    modules = done.stdout.split()
    others = {name.partition(".")[0] for name in modules} - sys.stdlib_module_names
    assert {name for name in others if not name.startswith(("polyscale", "_sysconfigdata"))} <= {
        "pluggy", "stevedore", "platformdirs",
    }  # fmt: skip
    builders = {f"polyscale.ops.{name}" for name in ("building", "locking", "ninja_file", "prerequisites", "wheel")}
    assert not {*builders, "polyscale.sdk", "polyscale.config"} & set(modules)
    assert [name for name in modules if name.startswith("torch.")] == []


def test_a_write_is_seen_by_autograd(used):
    weight = torch.randn(10, requires_grad=True)
    product = (weight * weight).sum()
    others = [torch.zeros(10) for _ in range(3)]
    used["fused_adam_"](weight, *others, lr=0.1, step=1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()
    with torch.inference_mode():
        used["fill_"](torch.ones(3), 2.0)


def test_torch_finds_the_ops_sound(used):
    """``opcheck`` is torch's own: schemas, fake tensors, and what ``torch.compile`` does with them."""
    copy = torch.zeros(10, dtype=torch.bfloat16)
    torch.library.opcheck(used["fused_adam_"].default, (*state(10), copy), {"lr": 0.1, "step": 1})
    torch.library.opcheck(used["add_scaled_"].default, (torch.randn(4), torch.randn(4).half(), 2.0, 0.5))
    torch.library.opcheck(used["fill_"].default, (torch.randn(4), 2.0))
    torch.library.opcheck(used["sum_of_squares"].default, ([torch.randn(4), torch.randn(3)],))


def test_neither_kernels_nor_references_are_recorded_by_autograd(used):
    for dtype in (torch.float32, torch.float64):
        weight = torch.nn.Parameter(torch.ones(3, dtype=dtype))
        rest = [torch.full((3,), value, dtype=dtype) for value in (0.0, 0.0, 1.0)]
        used["fused_adam_"](weight, *rest, lr=0.5, step=1)
        torch.testing.assert_close(weight.detach(), torch.full((3,), 0.5, dtype=dtype))
        target = torch.zeros(3, dtype=dtype)
        used["add_scaled_"](target, weight)
        assert not target.requires_grad and torch.equal(target, weight)


def test_what_the_kernels_do_not_cover_goes_to_the_reference(used):
    for dtype in (torch.float64, torch.float32):
        one, two = state(dtype=dtype), state(dtype=dtype)
        if dtype == torch.float32:  # every second element
            one = [torch.stack([each, each], 1)[:, 0].t() for each in one]
            assert not one[0].is_contiguous()
        used["fused_adam_"](*one, lr=0.1, step=1)
        adam.fused_adam_(*two, lr=0.1, step=1)
        assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    wide = torch.ones(5, dtype=torch.float64)
    used["add_scaled_"](wide, torch.ones(5), 0.1, 0.2)
    assert torch.equal(wide, torch.full((5,), 1.0, dtype=torch.float64) * 0.1 + 0.2)
    used["fill_"](wide, 0.1)
    assert torch.equal(wide, torch.full((5,), 0.1, dtype=torch.float64))
    strided = torch.arange(12.0).reshape(3, 4).t()
    assert used["sum_of_squares"]([strided, strided[:, 1:]])[0].item() == 506 + sum(i * i for i in range(4, 12))


def test_kernels_and_references_agree(used):
    for grad_dtype in (torch.float32, torch.bfloat16, torch.float16):
        one, two = state(), state()
        copies = torch.zeros(1000, dtype=torch.bfloat16), torch.zeros(1000, dtype=torch.bfloat16)
        for step in range(1, 6):
            settings = {"lr": 0.01, "weight_decay": 0.1, "step": step, "grad_scale": 0.25, "decoupled": step % 2 == 0}
            used["fused_adam_"](*one[:3], one[3].to(grad_dtype), copies[0], **settings)
            adam.fused_adam_(*two[:3], two[3].to(grad_dtype), copies[1], **settings)
        for found, right in zip(one[:3], two[:3], strict=True):
            torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(*copies, rtol=1e-2, atol=1e-6)
    target, source = torch.randn(1000), torch.randn(1000).half()
    expected = target.clone()
    used["add_scaled_"](target, source, 0.3, 0.7)
    elementwise.add_scaled_(expected, source, 0.3, 0.7)
    torch.testing.assert_close(target, expected)
    torch.testing.assert_close(used["sum_of_squares"]([target, source]), sums.sum_of_squares([target, source]))


def _flat(**changed):
    param, exp_avg, exp_avg_sq, grad = state()
    return {"param": param, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq, "grad": grad, **changed}


WRONG = [
    ({"grad": torch.zeros(999)}, r"grad of shape \(999,\): param is of shape \(1000,\)"),
    ({"grad": torch.zeros(10, 100)}, r"grad of shape \(10, 100\)"),
    ({"exp_avg": torch.zeros(1000).double()}, "exp_avg of dtype torch.float64"),
    ({"exp_avg_sq": torch.zeros(1000).half()}, "exp_avg_sq of dtype torch.float16"),
    ({"exp_avg": torch.zeros(1)}, r"exp_avg of shape \(1,\)"),
    ({"grad": torch.zeros(1000, dtype=torch.int32)}, "grad of dtype torch.int32"),
    ({"grad": torch.zeros(1000, dtype=torch.complex64)}, "grad of dtype torch.complex64"),
    ({"grad": torch.zeros(1000).to_sparse()}, "layout torch.sparse_coo"),
    ({"copy": torch.zeros(1000, dtype=torch.int8)}, "copy of dtype torch.int8"),
    ({"copy": torch.zeros(1001)}, r"copy of shape \(1001,\)"),
    ({"copy": torch.zeros(1000, device="meta")}, "copy on meta"),
    ({"step": 0}, "step=0"),
    ({"beta1": 1.0}, "beta1=1.0"),
    ({"beta2": float("nan")}, "beta2=nan"),
]


@pytest.mark.parametrize(("changed", "message"), WRONG, ids=[message for _, message in WRONG])
def test_a_wrong_argument_of_adam_is_named(used, changed, message):
    arguments = {"lr": 0.1, "step": 1, **_flat(), **changed}
    for function in (adam.fused_adam_, used["fused_adam_"]):
        with pytest.raises(PolyscaleError, match=message):
            function(**arguments)


def test_tensors_that_share_memory_are_refused(used):
    buffer = torch.zeros(1999)
    with pytest.raises(PolyscaleError, match="param and exp_avg share memory"):
        used["fused_adam_"](**_flat(param=buffer[:1000], exp_avg=buffer[999:]), lr=0.1, step=1)
    same = torch.zeros(1000)
    with pytest.raises(PolyscaleError, match="param and grad share memory"):
        used["fused_adam_"](**_flat(param=same, grad=same), lr=0.1, step=1)
    with pytest.raises(PolyscaleError, match="target and source share memory"):
        used["add_scaled_"](buffer[1:], buffer[:-1])
    with pytest.raises(PolyscaleError, match="target and source share memory"):
        used["add_scaled_"](buffer[:500].view(torch.bfloat16)[:500], buffer[:500])
    used["add_scaled_"](buffer[:1000], buffer[1000:].new_ones(1000))
    assert buffer.sum() == 1000


def test_wrong_arguments_of_the_others_are_named(used):
    with pytest.raises(PolyscaleError, match=r"source of shape \(3,\): target is of shape \(4,\)"):
        used["add_scaled_"](torch.zeros(4), torch.zeros(3))
    with pytest.raises(PolyscaleError, match=r"target of dtype torch.int64"):
        used["fill_"](torch.zeros(4, dtype=torch.int64), 1.0)
    with pytest.raises(PolyscaleError, match=r"tensors\[1\] of dtype torch.bool"):
        used["sum_of_squares"]([torch.zeros(4), torch.zeros(4, dtype=torch.bool)])
    with pytest.raises(PolyscaleError, match="Give one or more"):
        used["sum_of_squares"]([])


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def _sum_is_right(used):
    tensor = torch.full((300_000,), 2.0)
    used["fill_"](tensor, 3.0)
    return used["sum_of_squares"]([tensor])[0].item() == 9.0 * 300_000


def test_calls_from_several_threads_at_once(used, two_threads):
    outcomes = []
    callers = [
        threading.Thread(target=lambda: outcomes.extend(_sum_is_right(used) for _ in range(50))) for _ in range(4)
    ]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(60)
    assert outcomes == [True] * 200


def test_a_forked_child_computes(used, two_threads):
    assert _sum_is_right(used)  # the parent's threads are there now
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons warn of any fork beside threads
        child = os.fork()
    if child == 0:
        fine = False
        try:
            fine = _forked(used)
        finally:
            os._exit(0 if fine else 1)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            assert os.waitstatus_to_exitcode(status) == 0
            assert _sum_is_right(used)
            return
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    pytest.fail("the forked child hangs")


def _forked(used):
    """Only the extension is used: torch's own threads do not survive a fork."""
    extension = ops.load_module(MODULE)
    tensor = torch.empty(300_000)
    extension.fill(tensor.data_ptr(), 0, tensor.numel(), 3.0, 2)
    table = torch.tensor([tensor.data_ptr(), tensor.numel(), 0])
    return extension.sum_of_squares(table.data_ptr(), 1, 2) == (9.0 * 300_000, True)
