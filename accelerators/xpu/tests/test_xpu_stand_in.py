"""The XPU accelerator over a stand-in with the names and signatures of ``torch.xpu``, in processes of its own."""

import importlib.util
from pathlib import Path

import pytest
import torch

from polyscale.errors import PolyscaleError, UnsupportedError
from polyscale.testing.alone import alone
from polyscale.testing.device_checks import check_every_method
from polyscale.testing.distributions import write_distribution
from polyscale.testing.signatures import read_record
from polyscale.testing.stand_in import StandIn
from polyscale_xpu import env, host
from polyscale_xpu.accelerator import XpuAccelerator

HERE = Path(__file__).parent
RECORD = read_record(HERE / "torch_xpu.json")


def read_now():
    """What this torch's ``torch.xpu`` has."""
    spec = importlib.util.spec_from_file_location("record_xpu", HERE / "record_signatures.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.read()


def started(record, devices=2):
    torch.version.xpu = "20250302"
    fake = StandIn(record, devices=devices)
    fake.install()
    return XpuAccelerator(), fake


def every_method(record):
    xpu, fake = started(record)
    check_every_method(xpu, fake)
    assert xpu.capabilities.dtypes == {"fp64", "fp32", "bf16", "fp16"}
    stream = next(given for name, given in fake.calls if name == "Stream.__init__")
    assert stream["device"] == torch.device("xpu", 1)


def test_every_method_reaches_torch_xpu_by_its_name_here_and_as_recorded():
    now = read_now()
    alone(every_method, now)
    if now.version == RECORD.version:
        assert now.names == RECORD.names
    else:
        alone(every_method, RECORD)


def without(name):
    with pytest.raises((AssertionError, AttributeError, PolyscaleError)) as caught:
        check_every_method(*started(RECORD.without(name)))
    return str(caught.value)


@pytest.mark.parametrize("name", ["get_device_properties", "set_rng_state", "is_available"])
def test_a_name_that_torch_drops_fails_and_is_named(name):
    assert name in alone(without, name)


def causes():
    xpu, _ = started(RECORD, devices=0)
    host.nodes = lambda: []
    assert "no Intel GPU has a driver" in xpu.why_unavailable()
    host.nodes, host.may_use = lambda: ["/dev/dri/renderD128", "/dev/dri/renderD129"], lambda devices: False
    assert "may not open /dev/dri/renderD128; add it to the group render" in xpu.why_unavailable()
    host.may_use, host.has_level_zero = lambda devices: True, lambda: False
    assert "libze_loader.so.1) is missing" in xpu.why_unavailable()
    host.has_level_zero = lambda: True
    said = {
        "": "hides every",
        "2,3.1": "torch sees no device with ZE_AFFINITY_MASK='2,3.1'; GPUs of this host: 2, numbered from 0 (each",
        "1": "sees no xpu device",
        "0.1": "sees no xpu device",
    }
    for mask, words in said.items():
        env.mask = lambda mask=mask: mask
        assert words in xpu.why_unavailable(), (mask, xpu.why_unavailable())
    with pytest.raises(UnsupportedError, match="sees no xpu device"):
        xpu.new_event()


def test_sdk_without_hardware_has_a_reason_for_each_cause():
    alone(causes)


@pytest.mark.skipif(torch.version.xpu is not None, reason="this torch is built with XPU")
def test_torch_built_without_xpu_is_told():
    xpu = XpuAccelerator()
    assert "is built without XPU; install an XPU build of torch" in xpu.why_unavailable()
    assert xpu.device_count() == 0
    assert xpu.capabilities.dtypes == {"fp32", "bf16", "fp16"}


def test_the_extension_that_ends_processes_is_told_and_not_imported(monkeypatch, tmp_path):
    source = {"intel_extension_for_pytorch": "raise SystemExit(1)"}
    folder = write_distribution(
        tmp_path, "intel-extension-for-pytorch", version="2.8.0", entry_points={}, modules=source
    )
    monkeypatch.syspath_prepend(str(folder))
    host.version_of.cache_clear()
    try:
        rows = {row.name: row for row in XpuAccelerator().diagnose()}
    finally:
        host.version_of.cache_clear()
    row = rows["intel-extension-for-pytorch"]
    assert (row.value, row.ok) == ("2.8.0", False)
    assert "pip uninstall intel-extension-for-pytorch" in row.fix


def test_compiler_of_the_named_root_comes_first(tmp_path):
    compiler = tmp_path / "bin" / "icpx"
    compiler.parent.mkdir()
    compiler.write_text("#!/bin/sh\necho 'Intel(R) oneAPI DPC++/C++ Compiler 2025.2.0 (2025.2.0.20250605)'\n")
    compiler.chmod(0o755)
    found = host.toolchain([str(tmp_path)])
    assert (found.compiler, found.root) == (str(compiler), str(tmp_path))
    assert "-fsycl" in found.flags
    assert {row.name: row.value for row in host.findings(found)}["icpx"] == f"2025.2.0 ({compiler})"
