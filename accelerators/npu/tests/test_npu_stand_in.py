"""The NPU accelerator over a stand-in with the names and signatures of torch-npu's wheel, in processes of its own."""

import dataclasses
from pathlib import Path

import pytest
import torch

from polyscale.errors import PolyscaleError, UnsupportedError
from polyscale.testing.alone import alone
from polyscale.testing.device_checks import check_every_method
from polyscale.testing.signatures import read_record
from polyscale.testing.stand_in import StandIn, pretend_installed
from polyscale_npu import env, host
from polyscale_npu.accelerator import NpuAccelerator

RECORD = read_record(Path(__file__).with_name("torch_npu.json"))


def started(record=RECORD, devices=2):
    pretend_installed("torch_npu")
    fake = StandIn(record, devices=devices)
    fake.install()
    return NpuAccelerator(), fake


def every_method():
    check_every_method(*started())


def test_every_method_reaches_the_module_by_its_recorded_name():
    alone(every_method)


def without(name):
    with pytest.raises((AssertionError, AttributeError, PolyscaleError)) as caught:
        check_every_method(*started(RECORD.without(name)))
    return str(caught.value)


@pytest.mark.parametrize("name", ["set_rng_state", "Stream", "is_bf16_supported", "synchronize"])
def test_a_name_that_the_vendor_drops_fails_and_is_named(name):
    assert name in alone(without, name)


def test_memory_statistics_that_the_vendor_drops_are_a_broken_claim():
    assert "declares memory statistics, but asking for them failed" in alone(without, "memory_reserved")


def renamed_argument():
    names = {**RECORD.names, "set_rng_state": "(state)"}
    with pytest.raises(TypeError, match="takes 1 positional argument but 2 were given"):
        check_every_method(*started(dataclasses.replace(RECORD, names=names)))


def test_an_argument_that_the_vendor_drops_fails():
    alone(renamed_argument)


def dtypes():
    npu, fake = started()
    assert npu.capabilities.dtypes == {"fp32", "fp16", "bf16"}
    fake.module.is_bf16_supported = lambda including_emulation=False: False
    assert npu.capabilities.dtypes == {"fp32", "fp16"}


def test_dtypes_are_what_the_chip_multiplies():
    alone(dtypes)


def causes():
    npu, _ = started(devices=0)
    assert (npu.is_available(), npu.device_count()) == (False, 0)
    host.has_driver, host.physical_devices = lambda: False, lambda: 0
    assert "no Ascend driver is loaded (/dev/davinci_manager is absent)" in npu.why_unavailable()
    host.has_driver, host.physical_devices, env.toolkit = lambda: True, lambda: 2, lambda: None
    assert "source set_env.sh" in npu.why_unavailable()
    env.toolkit = lambda: "/opt/cann"
    for mask, said in {"5": "this host has 2: 0 to 1", "1,0": "not in ascending order", "": "hides every"}.items():
        env.mask = lambda mask=mask: mask
        assert said in npu.why_unavailable()
    for mask in ("0-1", "1,5,0", "0, 1", None):  # read up to what is no device of this host: one is left
        env.mask = lambda mask=mask: mask
        assert "sees no npu device" in npu.why_unavailable()
    for call in (npu.memory, npu.synchronize, npu.new_stream, npu.rng_state, lambda: npu.set_device(0)):
        with pytest.raises(UnsupportedError) as caught:
            call()
        assert "sees no npu device" in caught.value.why


def test_sdk_without_hardware_has_a_reason_for_each_cause():
    alone(causes)


def other_owner():
    pretend_installed("torch_npu")
    torch.utils.rename_privateuse1_backend("acme")
    npu = NpuAccelerator()
    assert "'acme' owns it" in npu.why_unavailable()
    with pytest.raises(UnsupportedError) as caught:
        npu.activate()
    assert "'acme' owns it" in caught.value.why
    assert "Choose accelerator 'acme'" in caught.value.fix


def test_another_owner_of_the_slot_is_named():
    alone(other_owner)


def test_the_record_says_what_was_read():
    assert (RECORD.module, RECORD.version) == ("torch.npu", "2.14.0")
    assert "wheel of torch-npu" in RECORD.source
    assert RECORD.names["set_rng_state"] == "(new_state, device='npu')"
    assert RECORD.names["get_device_name"] == "(device_name=None)"


def test_hardware_without_sdk_is_told(monkeypatch):
    monkeypatch.setattr(host, "physical_devices", lambda: 8)
    assert "this host has 8 NPUs, but torch_npu is not installed; pip install" in NpuAccelerator().why_unavailable()
    with pytest.raises(UnsupportedError, match="No module named 'torch_npu'"):
        NpuAccelerator().activate()


def test_cann_and_its_compiler_are_found_below_the_named_root(monkeypatch, tmp_path):
    compiler = tmp_path / "compiler" / "ccec_compiler" / "bin" / "bisheng"
    compiler.parent.mkdir(parents=True)
    compiler.write_text("#!/bin/sh\necho 'clang version 15.0.5 (BiSheng)'\n")
    compiler.chmod(0o755)
    (tmp_path / "x86_64-linux").mkdir()
    (tmp_path / "x86_64-linux" / "ascend_toolkit_install.info").write_text("package_name=x\nversion=8.3.RC1\n")
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path))
    rows = {row.name: row for row in NpuAccelerator().diagnose()}
    assert rows["CANN"].value == "8.3.RC1"
    assert rows["bisheng"].value == f"15.0.5 ({compiler})"
    assert NpuAccelerator().toolchain().root == str(tmp_path)
