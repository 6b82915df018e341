"""Ops: registered with torch once, run by a kernel where one loads and by their reference everywhere else."""

import itertools
import logging
import os
import subprocess
import sys
import textwrap

import pytest
import torch

from polyscale.errors import BuildError, PluginError
from polyscale.ops import modules, use
from polyscale.ops.libraries import find_op
from polyscale.testing.distributions import write_distribution
from polyscale.testing.kernel_modules import find_compiler, write_module, write_op_library

_NUMBERS = itertools.count()


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("POLYSCALE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Install a library with an op whose kernel also multiplies by 3; returns the op's name and the module."""

    def do(**fields):
        find_compiler()
        op = f"acme_scale_{next(_NUMBERS)}_"
        module = write_module(tmp_path / op / "source", value=3, **fields)
        monkeypatch.syspath_prepend(str(write_op_library(tmp_path / op / "site", module, op, dist=f"acme-{op}")))
        return op, module

    return do


@pytest.fixture
def declare(tmp_path, monkeypatch):
    """Install a library from source text."""

    def do(source, *, dist="acme-declared"):
        name = f"acme_declared_{next(_NUMBERS)}"
        entry_points = {"polyscale.op": {name: f"{name}:Plugin"}}
        head = """
            from pathlib import Path
            from polyscale.hooks import hookimpl
            from polyscale.interfaces.op import Kernel, KernelModule, Op, Source

            class Plugin:
                interface_version = (1, 0)
                @hookimpl
                def polyscale_op(self, context):
                    return Library()

            class Library:
                name = "declared"
                def ops(self): return OPS
                def modules(self): return MODULES
                def kernels(self): return KERNELS

            OPS, MODULES, KERNELS = [], [], []
        """
        text = textwrap.dedent(head) + textwrap.dedent(source)
        folder = write_distribution(tmp_path / name, dist, entry_points=entry_points, modules={name: text})
        monkeypatch.syspath_prepend(str(folder))

    return do


def scaled(op, tensor, factor):
    op(tensor, factor)
    return tensor.tolist()


def test_the_kernel_runs_on_its_device_type(install):
    name, module = install()
    op = use(name, "cpu")
    assert op is getattr(torch.ops.polyscale, name)
    assert scaled(op, torch.tensor([1.0, 2.0]), 10.0) == [30.0, 60.0]
    assert use(name, "cpu") is op
    assert module in modules()


def test_without_a_kernel_for_the_device_type_the_reference_runs(install, caplog):
    name, _ = install()
    op = use(name, "meta")
    assert scaled(op, torch.tensor([1.0, 2.0]), 10.0) == [10.0, 20.0]
    assert op(torch.empty(3, device="meta"), 2.0) is None
    assert not caplog.records
    use(name, "cpu")
    assert scaled(op, torch.tensor([1.0, 2.0]), 10.0) == [30.0, 60.0], "the kernel of a second device type is added"


def test_torch_finds_the_op_sound(install):
    """``opcheck`` is torch's own: the schema agrees with what runs, and so do fake tensors and functionalization."""
    name, _ = install()
    op = use(name, "cpu")
    torch.library.opcheck(op.default, (torch.randn(5), 0.5))
    assert op.default._schema.arguments[0].alias_info.is_write


def test_an_unknown_op_is_an_error_with_the_nearest(install):
    name, _ = install()
    with pytest.raises(PluginError) as error:
        use(name.replace("scale", "scael"), "cpu")
    assert f"Did you mean {name!r}" in error.value.fix


def test_an_op_that_two_distributions_declare_is_an_error_that_names_both(declare):
    op = f"acme_twice_{next(_NUMBERS)}"
    for dist in ("acme-one", "acme-two"):
        declare(f"OPS = [Op({op!r}, '(Tensor x) -> Tensor', abs)]", dist=dist)
    with pytest.raises(PluginError, match=r"acme-one 1.0 and acme-two 1.0|acme-two 1.0 and acme-one 1.0"):
        find_op(op)


def test_a_schema_that_torch_refuses_is_an_error_with_the_reason(declare):
    op = f"acme_odd_{next(_NUMBERS)}"
    declare(f"OPS = [Op({op!r}, '(Tenser x) -> Tensor', abs)]")
    with pytest.raises(PluginError, match=r"torch refuses its schema .*Tenser"):
        use(op, "cpu")


def test_a_source_that_does_not_compile_leaves_the_reference_said_once(install, caplog):
    name, module = install(extra="int broken() { return undeclared_name; }")
    op = use(name, "cpu")
    assert scaled(op, torch.tensor([1.0, 2.0]), 10.0) == [10.0, 20.0]
    use(name, "cpu")
    said = [record for record in caplog.records if "Building" not in record.getMessage()]
    assert len(said) == 1 and said[0].levelno == logging.WARNING
    text = said[0].getMessage()
    assert f"{module.name}.cpp:" in text and "undeclared_name" in text, "file and first error"
    assert "failed.log" in text
    assert text.endswith(f"On cpu the op runs its PyTorch reference: {name}")


def test_ops_of_a_module_that_fails_are_named_in_one_line(tmp_path, declare, caplog):
    find_compiler()
    module = write_module(tmp_path / "source", extra="#error none of this")
    one, two = (f"acme_pair_{next(_NUMBERS)}" for _ in range(2))
    declare(f"""
        OPS = [Op(name, "(Tensor x) -> Tensor", lambda x: x + 1) for name in ({one!r}, {two!r})]
        MODULES = [KernelModule({module.name!r}, Path({str(module.folder)!r}), "cpu", (Source("{module.name}.cpp"),))]
        KERNELS = [Kernel(op.name, "cpu", {module.name!r}, lambda extension: None) for op in OPS]
    """)
    for name in (one, two):
        assert use(name, "cpu")(torch.tensor(1)) == 2
    said = [record.getMessage() for record in caplog.records if "Building" not in record.getMessage()]
    assert len(said) == 1 and said[0].endswith(f"On cpu the ops run their PyTorch references: {one}, {two}")


def test_a_kernel_of_another_library_is_used(tmp_path, declare):
    find_compiler()
    module = write_module(tmp_path / "source", value=9)
    op = f"acme_far_{next(_NUMBERS)}"
    declare(f"OPS = [Op({op!r}, '(Tensor x) -> Tensor', lambda x: x)]")
    declare(
        f"""
        MODULES = [KernelModule({module.name!r}, Path({str(module.folder)!r}), "cpu", (Source("{module.name}.cpp"),))]
        KERNELS = [Kernel({op!r}, "cpu", {module.name!r}, lambda extension: lambda x: x * extension.value())]
        """,
        dist="acme-kernels",
    )
    assert use(op, "cpu")(torch.tensor(2)) == 18


def test_of_two_kernels_the_first_that_loads_is_used(tmp_path, declare, caplog):
    find_compiler()
    good = write_module(tmp_path / "good", value=9)
    bad = write_module(tmp_path / "bad", extra="#error no")
    op = f"acme_choice_{next(_NUMBERS)}"
    declare(f"OPS = [Op({op!r}, '(Tensor x) -> Tensor', lambda x: x)]")
    for module in (bad, good):
        declare(
            f"""
            SOURCE = Source("{module.name}.cpp")
            MODULES = [KernelModule({module.name!r}, Path({str(module.folder)!r}), "cpu", (SOURCE,))]
            KERNELS = [Kernel({op!r}, "cpu", {module.name!r}, lambda extension: lambda x: x * extension.value())]
            """,
            dist=f"acme-{module.name}",
        )
    assert use(op, "cpu")(torch.tensor(2)) == 18
    assert "#error no" in caplog.text
    assert "reference" not in caplog.text, "it does not run"


@pytest.mark.parametrize(
    ("kernels", "why"),
    [
        ("[Kernel(OPS[0].name, 'cpu', 'nowhere', lambda extension: abs)]", "names the module 'nowhere'"),
        ("[Kernel(OPS[0].name, 'cpu', MODULES[0].name, lambda extension: extension.lacking)]", "lacking"),
    ],
    ids=["no such module", "no such function"],
)
def test_a_kernel_that_cannot_be_had_leaves_the_reference(tmp_path, declare, kernels, why, caplog):
    find_compiler()
    module = write_module(tmp_path / "source")
    op = f"acme_lost_{next(_NUMBERS)}"
    declare(f"""
        OPS = [Op({op!r}, "(Tensor x) -> Tensor", lambda x: x + 1)]
        MODULES = [KernelModule({module.name!r}, Path({str(module.folder)!r}), "cpu", (Source("{module.name}.cpp"),))]
        KERNELS = {kernels}
    """)
    assert use(op, "cpu")(torch.tensor(1)) == 2
    assert why in caplog.text and "acme-declared 1.0" in caplog.text


def test_a_broken_library_hides_no_other(install, declare, caplog):
    declare("1 / 0", dist="acme-broken")
    name, _ = install()
    assert scaled(use(name, "cpu"), torch.tensor([1.0]), 1.0) == [3.0]
    assert len([record for record in caplog.records if "acme-broken" in record.getMessage()]) == 1


def test_an_unwritable_cache_leaves_the_reference_and_says_what_to_set(install, tmp_path, monkeypatch, caplog):
    name, _ = install()
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("POLYSCALE_CACHE", str(tmp_path / "file" / "below"))
    assert scaled(use(name, "cpu"), torch.tensor([1.0]), 1.0) == [1.0]
    assert "POLYSCALE_CACHE" in caplog.text


def test_an_error_of_a_build_crosses_processes():
    import pickle

    error = pickle.loads(pickle.dumps(BuildError("x", why="y", fix="z")))
    assert (type(error), error.given, error.why, error.fix) == (BuildError, "x", "y", "z")


WITHOUT = """
import logging, sys
sys.modules["ninja"] = None  # as where the package is not installed
logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
import polyscale, polyscale.ops
assert "torch" not in sys.modules
import torch
op = polyscale.ops.use(sys.argv[1], "cpu")
polyscale.ops.use(sys.argv[1], "cpu")
x = torch.ones(2)
op(x, 5.0)
print(x.tolist())
model = torch.nn.Linear(2, 1)
config = {"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}}
with polyscale.initialize(model, config=config) as engine:
    losses = []
    for _ in range(5):
        loss = (engine(torch.ones(4, 2)) - 3).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
assert losses[-1] < losses[0]
from polyscale.ops import modules, status
for module in modules():
    if module.name == sys.argv[2]:
        print(status(module).state, "-", status(module).why, "-", status(module).fix)
"""


@pytest.mark.parametrize(
    ("path", "why"),
    [
        pytest.param("", "there is no C++ compiler", id="nothing"),
        pytest.param(None, "ninja is not installed", id="no ninja", marks=pytest.mark.long),
    ],
)
def test_without_tools_everything_works_on_the_references_said_once(install, tmp_path, path, why):
    name, module = install()
    if path is None:  # a folder with the compiler alone
        (tmp_path / "bin").mkdir()
        for tool in ("c++", "as", "ld"):
            (tmp_path / "bin" / tool).symlink_to(_which(tool))
        path = str(tmp_path / "bin")
    environ = {key: value for key, value in os.environ.items() if key not in ("CUDA_HOME", "CXX", "CC")}
    environ |= {"PATH": path, "PYTHONPATH": os.pathsep.join(filter(lambda each: "site" in each, sys.path))}
    environ |= {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "error", "-c", WITHOUT, name, module.name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, env=environ)
    assert done.returncode == 0, done.stderr
    scaled_by_the_reference, state = done.stdout.splitlines()
    assert scaled_by_the_reference == "[5.0, 5.0]"
    assert state.startswith(f"cannot build - {why} - ")
    lines = [line for line in done.stderr.splitlines() if name in line]
    assert len(lines) == 1 and lines[0].startswith("WARNING ") and why in lines[0]
    assert lines[0].endswith(f"On cpu the op runs its PyTorch reference: {name}")


def _which(tool):
    import shutil

    return shutil.which(tool) or pytest.skip(f"no {tool}")
