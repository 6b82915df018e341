"""The accelerator plugin ``sim``: asked without a device, activated, in other processes, and its environment."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from polyscale import ops
from polyscale.errors import UnsupportedError
from polyscale.hooks import PluginContext
from polyscale.interfaces.accelerator import Accelerator
from polyscale.interfaces.op import OpLibrary
from polyscale_sim import SimOpsPlugin, SimPlugin, env
from polyscale_sim.accelerator import SimAccelerator
from polyscale_sim.device import MODULE


def python(code, **variables):
    """Run ``code`` in a new interpreter; returns its output and that of a traceback's last line."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, **variables},
        timeout=300,
        check=False,
    )
    return done.stdout.strip(), (done.stderr.strip().splitlines() or [""])[-1]


def test_the_plugins_hand_over_what_their_protocols_ask_for():
    accelerator = SimPlugin().polyscale_accelerator(PluginContext("sim"))
    library = SimOpsPlugin().polyscale_op(PluginContext("sim"))
    assert isinstance(accelerator, Accelerator)
    assert isinstance(library, OpLibrary)
    assert (accelerator.auto, accelerator.private) == (False, True)
    assert list(library.modules()) == [MODULE]
    assert MODULE in ops.modules()
    assert not MODULE.ahead


def test_every_source_of_the_extension_is_named():
    folder = Path(MODULE.folder)
    assert sorted(source.path for source in MODULE.sources) == sorted(path.name for path in folder.glob("*.cpp"))


def test_asking_registers_and_builds_nothing(tmp_path):
    code = (
        "import sys; from polyscale_sim.accelerator import SimAccelerator; a = SimAccelerator(); "
        "print(a.is_available(), a.device_count(), 'polyscale_sim_device' in sys.modules); import torch; "
        "print(torch.accelerator.is_available(), torch._C._get_privateuse1_backend_name())"
    )
    out, error = python(code, POLYSCALE_CACHE=str(tmp_path), POLYSCALE_SIM_DEVICES="3")
    assert out.split() == ["True", "3", "False", "False", "privateuseone"], error
    assert not list(tmp_path.rglob("*.so"))


def test_without_a_compiler_it_says_what_to_install(tmp_path):
    code = (
        "from polyscale_sim.accelerator import SimAccelerator; a = SimAccelerator(); print(a.is_available()); "
        "print(a.why_unavailable()); print([row.ok for row in a.diagnose()]); a.activate()"
    )
    out, error = python(code, POLYSCALE_CACHE=str(tmp_path), PATH=str(tmp_path), CXX="")
    assert out.startswith("False\nits extension cannot be built: "), out + error
    assert "install" in out.lower()
    assert out.endswith("[False, False]")
    assert "cannot be built: there is no C++ compiler" in error


@pytest.mark.parametrize(
    ("mask", "seen"),
    [("0,2", (0, 2)), ("3", (3,)), ("1,9,0", (1,)), ("2,2", (2,)), ("", ()), ("-1", ()), ("7", ()), ("²", ())],
)
def test_a_mask_is_read_up_to_the_first_absent_device(monkeypatch, mask, seen):
    monkeypatch.setenv(env.MASK, mask)
    assert env.visible() == seen
    accelerator = SimAccelerator()
    assert accelerator.device_count() == len(seen)
    if not seen:
        assert not accelerator.is_available()
        assert f"{mask!r} starts with no device that exists; there are 4, 0 to 3" in accelerator.why_unavailable()


@pytest.mark.parametrize(
    ("text", "limit"), [("1000", 1000), ("512MiB", 512 << 20), ("1.5 GB", 1_500_000_000), ("", 16 << 30)]
)
def test_memory_is_bytes_or_has_a_unit(monkeypatch, text, limit):
    monkeypatch.setenv(env.MEMORY, text)
    assert env.memory_limit() == limit


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        (env.DEVICES, "none"),
        (env.DEVICES, "65"),
        (env.MEMORY, "much"),
        (env.MEMORY, "5 parsecs"),
        (env.MEMORY, "99999999999999999999GiB"),
        (env.FAIL_ALLOCATION, "soon"),
        (env.FAIL_ALLOCATION, "9:1"),
        (env.FAIL_ALLOCATION, "0"),
        (env.DEAD_DEVICE, "4"),
        (env.LATE, "perhaps"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(monkeypatch, variable, value):
    monkeypatch.setenv(variable, value)
    with pytest.raises(UnsupportedError, match=f"{variable}='{value}'"):
        (env.memory_limit() and env.faults())
    accelerator = SimAccelerator()
    assert not accelerator.is_available()
    assert f"{variable}='{value}'" in accelerator.why_unavailable()


@pytest.mark.usefixtures("on_sim")
def test_the_accelerator_speaks_for_the_device():
    import torch

    accelerator = SimAccelerator()
    accelerator.activate()
    assert accelerator.is_available()
    assert accelerator.device_count() == 4
    assert accelerator.device() == torch.device("sim", 0)
    with pytest.raises(UnsupportedError, match="4 devices are visible"):
        accelerator.device(4)
    accelerator.reset_peak_memory()
    before = accelerator.memory()
    held = torch.empty(1000, dtype=torch.uint8, device=accelerator.device())
    during = accelerator.memory()
    assert during.allocated - before.allocated == 1000 == during.peak - before.allocated
    assert during.total == env.memory_limit()
    accelerator.manual_seed(3)
    state = accelerator.rng_state()
    first = torch.rand(4, device="sim")
    accelerator.set_rng_state(state)
    assert torch.equal(torch.rand(4, device="sim"), first)
    stream, event = accelerator.new_stream(), accelerator.new_event()
    with stream:
        event.record()
    event.synchronize()
    stream.synchronize()
    accelerator.synchronize()
    accelerator.empty_cache()
    assert [row.ok for row in accelerator.diagnose()] == [True, True]
    del held


@pytest.mark.usefixtures("on_sim")
@pytest.mark.parametrize("name", ["fp64", "fp32", "bf16", "fp16"])
def test_declared_dtypes_multiply(name):
    import torch

    dtype = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[name]
    assert name in SimAccelerator.capabilities.dtypes
    ones = torch.ones(16, 16, dtype=dtype, device="sim")
    assert torch.equal((ones @ ones).cpu(), torch.full((16, 16), 16, dtype=dtype))


START = "import torch; from polyscale_sim import device, faults; "


@pytest.fixture
def built():
    """Skip where the extension cannot be built; otherwise it is, once."""
    why = SimAccelerator().why_unavailable()
    if why and os.environ.get("CI") == "true":
        pytest.fail(why)
    if why:
        pytest.skip(why)


@pytest.mark.usefixtures("built")
def test_any_name_can_be_registered_but_only_one():
    code = START + (
        "device.register('acme'); print(torch.ones(2, device='acme:1').sum().item(), torch.acme.device_count())\n"
        "try: torch.empty(1, device='acme:4')\n"
        "except RuntimeError as error: print(error)\n"
        "from polyscale_sim.accelerator import SimAccelerator; a = SimAccelerator(); print(a.why_unavailable())\n"
        "a.activate()"
    )
    out, error = python(code)
    lines = out.splitlines()
    assert lines[0] == "2.0 4"
    assert lines[1] == "acme:4 does not exist: there are 4 devices, 0 to 3"
    assert "'acme' owns it" in lines[2]
    assert "UnsupportedError" in error
    assert "'acme' owns it" in error


@pytest.mark.usefixtures("built")
def test_the_environment_sets_devices_memory_and_faults():
    code = START + (
        "device.register(); print(torch.sim.device_count(), torch.sim.mem_get_info(1)[1], faults.is_late())\n"
        "for where in ('sim:0', 'sim:1'):\n"
        "  try: torch.empty(1, device=where)\n"
        "  except RuntimeError as error: print(type(error).__name__, str(error).split(':')[1][:7])"
    )
    variables = {
        "POLYSCALE_SIM_DEVICES": "8",
        "POLYSCALE_SIM_VISIBLE_DEVICES": "5,6",
        "POLYSCALE_SIM_MEMORY": "1MiB",
        "POLYSCALE_SIM_FAIL_ALLOCATION": "1",
        "POLYSCALE_SIM_DEAD_DEVICE": "1",
        "POLYSCALE_SIM_LATE": "1",
    }
    out, error = python(code, **variables)
    assert out.splitlines() == ["2 1048576 True", "OutOfMemoryError 0 is ou", "RuntimeError 1 is de"], error


@pytest.mark.usefixtures("built")
def test_a_mask_that_hides_every_device_is_refused_before_anything_is_registered():
    code = START + (
        "from polyscale.errors import UnsupportedError\n"
        "try: device.register()\n"
        "except UnsupportedError as error: print(error)\n"
        "print(torch._C._get_privateuse1_backend_name())"
    )
    out, _ = python(code, POLYSCALE_SIM_VISIBLE_DEVICES="9")
    assert "POLYSCALE_SIM_VISIBLE_DEVICES='9' starts with no device that exists; there are 4" in out
    assert out.endswith("privateuseone")


@pytest.mark.usefixtures("built")
def test_a_forked_child_of_a_process_with_the_device_computes():
    code = START + (
        "import os\n"
        "device.register(); x = torch.arange(4., device='sim'); child = os.fork()\n"
        "if child == 0:\n"
        "  y = torch.randn(8, 8); ok = torch.equal((y.to('sim') @ y.to('sim')).cpu(), y @ y)\n"
        "  os._exit(0 if ok and x.sum().item() == 6 else 1)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))"
    )
    assert python(code) == ("0", "")
