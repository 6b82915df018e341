"""TorchAccelerator over device types that torch knows in different ways: none at all, in-tree, PrivateUse1."""

import subprocess
import sys
import textwrap

import pytest
import torch

from polyscale.errors import UnsupportedError
from polyscale.interfaces.accelerator import Accelerator
from polyscale.torch_accelerator import NoEvent, NoStream, TorchAccelerator


class Unknown(TorchAccelerator):
    name = "acme"
    device_type = "acme"
    visible_devices_variable = "ACME_VISIBLE_DEVICES"
    modules = ("acme_sdk_that_is_absent",)
    install = "pip install acme-sdk"


def test_device_type_that_torch_does_not_know_is_told_and_never_raises():
    acme = Unknown()
    assert not acme.is_available()
    assert acme.why_unavailable() == "acme_sdk_that_is_absent is not installed; pip install acme-sdk"
    assert acme.device_count() == 0
    Unknown.modules, modules = (), Unknown.modules
    try:
        said = f"this torch ({torch.__version__}) has no device type 'acme'; pip install acme-sdk"
        assert acme.why_unavailable() == said
    finally:
        Unknown.modules = modules
    (row,) = acme.diagnose()
    assert not row.ok
    assert acme.toolchain() is None
    for call in (acme.activate, acme.synchronize, acme.device, lambda: acme.set_device(0), acme.rng_state):
        with pytest.raises(UnsupportedError):
            call()


def test_sdk_that_raises_is_told_and_not_raised():
    class Broken(Unknown):
        modules = ()

        def absence(self):
            raise OSError("libacme.so is missing")

    assert not Broken().is_available()
    assert "OSError: libacme.so is missing" in Broken().why_unavailable()


def test_undeclared_memory_statistics_are_refused_and_streams_do_nothing():
    acme = Unknown()
    with pytest.raises(UnsupportedError, match="Memory statistics"):
        acme.memory()
    acme.reset_peak_memory()
    assert isinstance(acme.new_stream(), NoStream)
    assert isinstance(acme.new_event(), NoEvent)
    assert isinstance(acme, Accelerator)


PRIVATE = """
import sys, types, torch
from polyscale.errors import UnsupportedError
from polyscale.interfaces.accelerator import Capabilities
from polyscale.torch_accelerator import TorchAccelerator

class Frost(TorchAccelerator):
    name = device_type = "frost"
    private = True
    visible_devices_variable = "FROST_VISIBLE_DEVICES"
    capabilities = Capabilities(frozenset({"fp32"}), memory_statistics=True)

class Other(Frost):
    name = device_type = "other"

frost = Frost()
assert not frost.is_available(), "not registered yet"
assert "has no device type 'frost'" in frost.why_unavailable()

state = {"index": 0, "seed": None, "peak": 70, "calls": []}
module = types.ModuleType("torch.frost")
module.is_available = lambda: True
module.device_count = lambda: 2
module.current_device = lambda: state["index"]
module.set_device = lambda index: state.update(index=index)
module.synchronize = lambda: state["calls"].append("synchronize")
module.empty_cache = lambda: state["calls"].append("empty_cache")
module.memory_allocated = lambda: 50
module.memory_reserved = lambda: 60
module.max_memory_allocated = lambda: state["peak"]
module.reset_peak_memory_stats = lambda: state.update(peak=50)
module.mem_get_info = lambda: (10, 100)
module.manual_seed = lambda seed: state.update(seed=seed)
module.get_rng_state = lambda device: torch.tensor([state["seed"], device.index], dtype=torch.uint8)
module.set_rng_state = lambda value, device: state.update(seed=int(value[0]))
torch.utils.rename_privateuse1_backend("frost")
torch._register_device_module("frost", module)

assert frost.is_available() and frost.why_unavailable() == ""
frost.activate()
assert frost.device_count() == 2 and frost.device(1) == torch.device("frost", 1)
frost.set_device(1)
assert frost.device() == torch.device("frost", 1)
frost.synchronize(); frost.empty_cache()
assert state["calls"] == ["synchronize", "empty_cache"]
use = frost.memory()
assert (use.allocated, use.reserved, use.peak, use.total) == (50, 60, 70, 100)
frost.reset_peak_memory()
assert frost.memory().peak == 50
frost.manual_seed(9)
saved = frost.rng_state()
assert saved.tolist() == [9, 1]
frost.manual_seed(3); frost.set_rng_state(saved)
assert state["seed"] == 9
assert frost.diagnose()[0].value == "2: frost:0, frost:1"

import os
os.environ["FROST_VISIBLE_DEVICES"] = "0,1"
try:
    frost.device(2)
except UnsupportedError as error:
    assert error.given == "frost device 2"
    assert error.why == "2 devices are visible (FROST_VISIBLE_DEVICES='0,1'); valid: 0 to 1", error.why
else:
    raise SystemExit("an index out of range was accepted")
module.is_available = lambda: False
assert "sees no frost device with FROST_VISIBLE_DEVICES='0,1'" in frost.why_unavailable(), frost.why_unavailable()

try:
    Other().activate()
except UnsupportedError as error:
    assert "'frost' owns it" in error.why
else:
    raise SystemExit("a second owner of PrivateUse1 was accepted")
assert not Other().is_available()
print("fine")
"""


def test_private_device_has_all_methods_and_one_owner():
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(PRIVATE)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, "fine\n"), done.stderr
