"""Why there is no CUDA device: each cause has its own sentence. Runs without a device."""

import pytest
import torch

from polyscale.discovery import load
from polyscale.errors import UnsupportedError
from polyscale_cuda import host
from polyscale_cuda.accelerator import CudaAccelerator


@pytest.fixture
def cuda():
    made = CudaAccelerator()
    if made.is_available():
        pytest.skip("this machine has a CUDA device")
    return made


def test_availability_and_reason_agree(cuda):
    assert load("accelerator", "cuda").is_available() is False
    assert cuda.why_unavailable()
    assert cuda.device_count() == 0


def test_torch_built_without_cuda_is_told(cuda, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "built without CUDA; install a CUDA build of torch" in cuda.why_unavailable()


def test_rocm_build_is_not_cuda_even_with_devices(cuda, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "6.4", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert not cuda.is_available()
    assert "built for ROCm 6.4" in cuda.why_unavailable()


def test_missing_driver_is_told(cuda, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    if host.has_driver():
        pytest.skip("a driver is loaded here")
    assert "no NVIDIA driver is loaded; if this machine has an NVIDIA GPU" in cuda.why_unavailable()


def test_mask_is_told_when_a_driver_is_there(cuda, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(host, "has_driver", lambda: True)
    monkeypatch.setattr(host, "physical_devices", lambda: 1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    why = cuda.why_unavailable()
    assert "CUDA_VISIBLE_DEVICES='7' starts with a device that is absent" in why
    assert "this host has 1: 0" in why


@pytest.mark.parametrize(
    ("mask", "devices", "said"),
    [
        (None, 2, ""),
        ("0", 2, ""),
        ("1,9", 2, ""),
        ("9,0", 2, "this host has 2: 0 to 1"),
        ("", 2, "hides every device"),
        ("-1", 2, "hides every device"),
        ("GPU-12", 2, ""),
        ("4", None, "starts with a device that is absent"),
        ("0", 0, ""),
    ],
)
def test_masks(mask, devices, said):
    text = host.explain_mask(mask, devices)
    assert said in text
    assert bool(text) == bool(said)


def test_an_identifier_in_the_mask_does_not_hide_what_cuda_says(cuda, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(host, "has_driver", lambda: True)
    monkeypatch.setattr(torch.cuda, "init", lambda: (_ for _ in ()).throw(RuntimeError("driver is too\nold")))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-12")
    said = "driver is too old (with CUDA_VISIBLE_DEVICES='GPU-12'; nvidia-smi -L lists the devices)"
    assert cuda.why_unavailable() == said


def test_using_an_absent_device_is_an_error_with_the_reason(cuda):
    for call in (lambda: cuda.set_device(0), cuda.memory, cuda.synchronize, cuda.device, lambda: cuda.manual_seed(1)):
        with pytest.raises(UnsupportedError) as caught:
            call()
        assert cuda.why_unavailable() in caught.value.why


def test_report_has_rows_without_a_device(cuda):
    rows = {row.name: row for row in cuda.diagnose()}
    assert {"devices", "driver", "CUDA of torch", "NCCL of torch", "nvcc"} <= set(rows)
    assert not rows["devices"].ok
    assert rows["devices"].fix == cuda.why_unavailable()


def test_toolkit_is_found_by_its_root(tmp_path):
    compiler = tmp_path / "bin" / "nvcc"
    compiler.parent.mkdir()
    compiler.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 12.9, V12.9.1'\n")
    compiler.chmod(0o755)
    found = host.toolchain(str(tmp_path))
    assert found.compiler == str(compiler)
    assert found.root == str(tmp_path.resolve())
    assert {row.name: row.value for row in host.findings(found)}["nvcc"].startswith("12.9 (")
