"""The ROCm accelerator over a stand-in with the names and signatures of ``torch.cuda``, in processes of its own."""

import importlib.util
from pathlib import Path

import pytest
import torch

from polyscale.errors import PolyscaleError, UnsupportedError
from polyscale.testing.alone import alone
from polyscale.testing.device_checks import check_every_method
from polyscale.testing.signatures import read_record
from polyscale.testing.stand_in import StandIn
from polyscale_rocm import env, host
from polyscale_rocm.accelerator import RocmAccelerator

HERE = Path(__file__).parent
RECORD = read_record(HERE / "torch_cuda.json")


def read_now():
    """What this torch's ``torch.cuda`` has."""
    spec = importlib.util.spec_from_file_location("record_cuda", HERE / "record_signatures.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.read()


def started(record=RECORD, devices=2, hip="6.4.43482", cuda=None):
    torch.version.hip, torch.version.cuda = hip, cuda
    fake = StandIn(record, devices=devices)
    fake.install()
    return RocmAccelerator(), fake


def every_method(record):
    check_every_method(*started(record))


def test_every_method_reaches_torch_cuda_by_its_name_here_and_as_recorded():
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


@pytest.mark.parametrize("name", ["set_device", "get_rng_state"])
def test_a_name_that_torch_drops_fails_and_is_named(name):
    assert name in alone(without, name)


def one_of_two(hip, cuda):
    rocm, _ = started(hip=hip, cuda=cuda)
    other = importlib.import_module("polyscale_cuda.accelerator").CudaAccelerator()
    return {made.name: (made.is_available(), made.why_unavailable()) for made in (rocm, other)}


def test_a_build_for_rocm_is_rocm_s_and_a_build_for_cuda_is_cuda_s():
    pytest.importorskip("polyscale_cuda")
    found = alone(one_of_two, "6.4.43482", None)
    assert found["rocm"] == (True, "")
    assert "belong to accelerator 'rocm'" in found["cuda"][1]
    found = alone(one_of_two, None, "13.0")
    assert found["cuda"] == (True, "")
    assert not found["rocm"][0]
    assert "is built for CUDA 13.0, whose devices belong to accelerator 'cuda'" in found["rocm"][1]


def causes():
    rocm, fake = started(devices=0)
    host.has_driver = lambda: False
    assert "no AMD driver is loaded (/dev/kfd is absent)" in rocm.why_unavailable()
    host.has_driver, host.may_use_driver = lambda: True, lambda: False
    assert "may not open /dev/kfd; add it to the groups render and video" in rocm.why_unavailable()
    host.may_use_driver, host.physical_devices = lambda: True, lambda: 4
    env.masks = lambda: {"ROCR_VISIBLE_DEVICES": "9"}
    assert "ROCR_VISIBLE_DEVICES='9' starts with a device that is absent" in rocm.why_unavailable()
    env.masks = dict
    fake.module.init = lambda: (_ for _ in ()).throw(RuntimeError("No HIP GPUs are available"))
    assert rocm.why_unavailable() == "No HIP GPUs are available"
    env.masks = lambda: {"ROCR_VISIBLE_DEVICES": "GPU-4b2c1a9f8d3e6f7a"}
    told = "(with ROCR_VISIBLE_DEVICES='GPU-4b2c1a9f8d3e6f7a'; rocminfo lists the devices)"
    assert rocm.why_unavailable() == f"No HIP GPUs are available {told}"
    with pytest.raises(UnsupportedError, match="No HIP GPUs are available"):
        rocm.memory()


def test_sdk_without_hardware_has_a_reason_for_each_cause():
    alone(causes)


@pytest.mark.skipif(torch.version.hip is not None, reason="this torch is built for ROCm")
def test_torch_built_without_rocm_is_told(monkeypatch):
    rocm = RocmAccelerator()
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "is built without ROCm; install a ROCm build of torch" in rocm.why_unavailable()
    assert (rocm.is_available(), rocm.device_count()) == (False, 0)


@pytest.mark.parametrize(
    ("masks", "said"),
    [
        ({}, ""),
        ({"ROCR_VISIBLE_DEVICES": "GPU-4b2c1a9f8d3e6f7a"}, ""),
        ({"ROCR_VISIBLE_DEVICES": "2,3", "HIP_VISIBLE_DEVICES": "1"}, ""),
        ({"ROCR_VISIBLE_DEVICES": "2,3", "HIP_VISIBLE_DEVICES": "2"}, "HIP_VISIBLE_DEVICES='2' starts with"),
        ({"HIP_VISIBLE_DEVICES": "0", "CUDA_VISIBLE_DEVICES": ""}, ""),
        ({"CUDA_VISIBLE_DEVICES": ""}, "CUDA_VISIBLE_DEVICES='' hides every device"),
    ],
)
def test_masks_act_one_within_another(monkeypatch, masks, said):
    for name in ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in masks.items():
        monkeypatch.setenv(name, value)
    text = host.explain_masks(env.masks(), 4)
    assert said in text
    assert bool(said) == bool(text)


def test_report_has_rows_without_a_device(tmp_path, monkeypatch):
    compiler = tmp_path / "bin" / "hipcc"
    compiler.parent.mkdir()
    compiler.write_text("#!/bin/sh\necho 'HIP version: 6.4.43482-0f2d60242'\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("ROCM_HOME", str(tmp_path))
    rows = {row.name: row for row in RocmAccelerator().diagnose()}
    assert {"devices", "driver", "ROCm of torch", "RCCL of torch", "hipcc"} == set(rows)
    assert rows["hipcc"].value == f"6.4.43482 ({compiler})"
