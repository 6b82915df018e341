"""The HPU accelerator over a stand-in with the names and signatures of Gaudi's bridge, in processes of its own."""

from pathlib import Path

import pytest
import torch

from polyscale.errors import PolyscaleError, UnsupportedError
from polyscale.testing.alone import alone
from polyscale.testing.device_checks import check_every_method
from polyscale.testing.signatures import read_record
from polyscale.testing.stand_in import StandIn, pretend_installed
from polyscale_hpu import env, host
from polyscale_hpu.accelerator import HpuAccelerator

RECORD = read_record(Path(__file__).with_name("torch_hpu.json"))


def started(record=RECORD, devices=2):
    pretend_installed("habana_frameworks.torch")
    fake = StandIn(record, devices=devices)
    fake.install()
    return HpuAccelerator(), fake


def every_method():
    hpu, fake = started()
    check_every_method(hpu, fake)
    asked = [given["device"] for name, given in fake.calls if name.endswith("rng_state")]
    assert set(asked) == {"hpu"}, "the bridge knows the random state of a process's one device only"


def test_every_method_reaches_the_module_by_its_recorded_name():
    alone(every_method)


def without(name):
    with pytest.raises((AssertionError, AttributeError, PolyscaleError)) as caught:
        check_every_method(*started(RECORD.without(name)))
    return str(caught.value)


@pytest.mark.parametrize("name", ["manual_seed", "stream", "get_rng_state"])
def test_a_name_that_the_vendor_drops_fails_and_is_named(name):
    assert name in alone(without, name)


def generations():
    hpu, fake = started()
    names = {"GAUDI": {"fp32", "bf16"}, "GAUDI2": {"fp32", "bf16", "fp16"}, "GAUDI3": {"fp32", "bf16", "fp16"}}
    for name, dtypes in names.items():
        fake.module.get_device_name = lambda device=None, name=name: name
        assert hpu.capabilities.dtypes == dtypes
    assert not hpu.capabilities.pinned_memory
    assert not hpu.capabilities.graphs


def test_dtypes_follow_the_generation():
    alone(generations)


def causes():
    hpu, _ = started(devices=0)
    assert (hpu.is_available(), hpu.device_count()) == (False, 0)
    host.has_driver = lambda: False
    assert "the driver habanalabs is not loaded" in hpu.why_unavailable()
    host.has_driver, host.module_ids = lambda: True, lambda: ["5", "4"]
    for mask, said in {"0,1": "this host has 4, 5", "": "hides every device", "4": "sees no hpu device"}.items():
        env.mask = lambda mask=mask: mask
        assert said in hpu.why_unavailable()
    with pytest.raises(UnsupportedError, match="sees no hpu device"):
        hpu.synchronize()


def test_sdk_without_hardware_has_a_reason_for_each_cause():
    alone(causes)


def beside_another():
    torch.utils.rename_privateuse1_backend("acme")
    check_every_method(*started())


def test_it_needs_no_slot_for_out_of_tree_devices():
    alone(beside_another)


def not_loaded():
    pretend_installed("habana_frameworks.torch")
    host.has_driver = lambda: True
    return HpuAccelerator().why_unavailable()


def test_a_plugin_that_torch_was_told_not_to_load_is_told():
    why = alone(not_loaded, env={"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"})
    assert "torch has not loaded it; unset TORCH_DEVICE_BACKEND_AUTOLOAD='0'" in why
    assert "torch has not loaded it; import it first" in alone(not_loaded)


def test_hardware_without_sdk_is_told(monkeypatch):
    monkeypatch.setattr(host, "module_ids", lambda: ["0"])
    assert "this host has 1 Gaudi devices, but no plugin for torch; install Gaudi" in HpuAccelerator().why_unavailable()
    with pytest.raises(UnsupportedError, match="No module named 'habana_frameworks'"):
        HpuAccelerator().activate()


def test_driver_version_is_the_kernel_s(monkeypatch, tmp_path):
    (tmp_path / "driver_ver").write_text("1.23.0-c6c0b3a\n")
    monkeypatch.setattr(host, "_DRIVER_VERSION", str(tmp_path / "driver_*"))
    monkeypatch.setattr(host, "_DRIVER", str(tmp_path))
    rows = {row.name: row for row in HpuAccelerator().diagnose()}
    assert (rows["driver"].value, rows["driver"].ok) == ("1.23.0", True)
    assert HpuAccelerator().toolchain() is None
