"""The SDAA accelerator over a stand-in with the documented names of torch-sdaa, in processes of its own."""

from pathlib import Path

import pytest
import torch

from polyscale.errors import PolyscaleError, UnsupportedError
from polyscale.testing.alone import alone
from polyscale.testing.device_checks import check_every_method
from polyscale.testing.signatures import read_record
from polyscale.testing.stand_in import StandIn, pretend_installed
from polyscale_sdaa import env, host
from polyscale_sdaa.accelerator import SdaaAccelerator

RECORD = read_record(Path(__file__).with_name("torch_sdaa.json"))


def started(record=RECORD, devices=2):
    pretend_installed("torch_sdaa")
    fake = StandIn(record, devices=devices)
    fake.install()
    return SdaaAccelerator(), fake


def every_method():
    sdaa, fake = started()
    check_every_method(sdaa, fake)
    assert sdaa.capabilities.dtypes == {"fp32", "fp16", "bf16"}
    assert not sdaa.capabilities.graphs


def test_every_method_reaches_the_module_by_its_documented_name():
    alone(every_method)


def without(name):
    with pytest.raises((AssertionError, AttributeError, PolyscaleError)) as caught:
        check_every_method(*started(RECORD.without(name)))
    return str(caught.value)


@pytest.mark.parametrize("name", ["get_rng_state", "Event", "set_device"])
def test_a_name_that_the_vendor_drops_fails_and_is_named(name):
    assert name in alone(without, name)


def causes():
    sdaa, _ = started(devices=0)
    assert (sdaa.is_available(), sdaa.device_count()) == (False, 0)
    host.files = lambda pattern: []
    assert "no Tecorigin driver is loaded (no /dev/tcaicard*)" in sdaa.why_unavailable()
    host.files = lambda pattern: ["/dev/tcaicard0"]
    env.mask = lambda: "7"
    assert "this host has 4: 0 to 3" in sdaa.why_unavailable()
    env.mask = lambda: None
    assert "sees no sdaa device" in sdaa.why_unavailable()
    with pytest.raises(UnsupportedError, match="sees no sdaa device"):
        sdaa.memory()


def test_sdk_without_hardware_has_a_reason_for_each_cause():
    alone(causes)


def other_owner():
    pretend_installed("torch_sdaa")
    torch.utils.rename_privateuse1_backend("acme")
    sdaa = SdaaAccelerator()
    assert "'acme' owns it" in sdaa.why_unavailable()
    with pytest.raises(UnsupportedError, match="'acme' owns it"):
        sdaa.activate()


def test_another_owner_of_the_slot_is_named():
    alone(other_owner)


def test_driver_and_compiler_are_found(monkeypatch, tmp_path):
    for name, text in {
        "teco-smi": "|  TECO-SMI: 1.15.0   SDAADriver: 3.2.0   |",
        "tecocc": "tecocc version 3.2.0",
    }.items():
        (tmp_path / name).write_text(f"#!/bin/sh\necho '{text}'\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    rows = {row.name: row for row in SdaaAccelerator().diagnose()}
    assert rows["driver"].value == "3.2.0"
    assert rows["tecocc"].value == f"3.2.0 ({tmp_path / 'tecocc'})"
    assert not rows["devices"].ok


def test_hardware_without_sdk_is_told(monkeypatch):
    monkeypatch.setattr(host, "files", lambda pattern: ["/dev/tcaicard0"])
    why = SdaaAccelerator().why_unavailable()
    assert "this host has 4 SDAA devices, but no torch_sdaa; install TecoToolKit" in why
    with pytest.raises(UnsupportedError, match="No module named 'torch_sdaa'"):
        SdaaAccelerator().activate()
