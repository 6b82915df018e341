"""Driver, devices, toolkit and compiler of the host. Nothing here raises or makes a CUDA context on a healthy host."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from polyscale import device_host
from polyscale.device_host import can_load, find_compiler, tool_output
from polyscale.interfaces.accelerator import Finding, Toolchain

_DRIVER = Path("/proc/driver/nvidia")
_INSTALL_DRIVER = "If this machine has an NVIDIA GPU, install its driver"
_USUAL_ROOT = "/usr/local/cuda"
_FLAGS = ("-O3", "-std=c++17", "-Xcompiler", "-fPIC")


def has_driver() -> bool:
    """Whether the driver's library can be loaded."""
    return can_load(*(("nvcuda.dll",) if sys.platform == "win32" else ("libcuda.so.1", "libcuda.so")))


def physical_devices() -> int | None:
    """Devices of this host, masked or not; None where the driver does not tell."""
    try:
        return len(list((_DRIVER / "gpus").iterdir()))
    except OSError:
        return None


def explain_mask(mask: str | None, devices: int | None) -> str:
    """Say why ``CUDA_VISIBLE_DEVICES`` leaves no device; "" where it is not the cause.

    CUDA reads the list up to the first entry that names no device, and hides all after it.
    """
    if mask == "NoDevFiles":
        return f"CUDA_VISIBLE_DEVICES={mask!r} hides every device; unset it"
    return device_host.explain_mask("CUDA_VISIBLE_DEVICES", mask, devices)


def initialisation_error(mask: str | None) -> str:
    """What CUDA says when it is initialised (an old driver, a failed device); called only where it sees no device.

    A mask that is set is told with it: it may name its devices by identifiers, of which none is here.
    """
    import torch

    said = "the driver is loaded and shows no device; see nvidia-smi"
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:
        said = " ".join(str(error).split())
    return said if mask is None else f"{said} (with CUDA_VISIBLE_DEVICES={mask!r}; nvidia-smi -L lists the devices)"


def toolchain(root: str | None) -> Toolchain | None:
    """``nvcc`` below ``root``, on the path, or below the usual root."""
    name = "nvcc.exe" if sys.platform == "win32" else "nvcc"
    named = find_compiler(name, [str(Path(root) / "bin")] if root else [], _FLAGS)
    return named or find_compiler(name, [str(Path(_USUAL_ROOT) / "bin")], _FLAGS)


def findings(compiler: Toolchain | None) -> list[Finding]:
    """Rows of the report: driver, what torch was built with, compiler."""
    import torch

    driver = _driver_version()
    rows = [
        Finding("driver", driver or "none", ok=bool(driver), fix="" if driver else _INSTALL_DRIVER),
        Finding("CUDA of torch", torch.version.cuda or "none", ok=torch.version.cuda is not None),
        Finding("NCCL of torch", _nccl_version()),
    ]
    if compiler is None:
        fix = "Only needed to compile kernels: install the CUDA toolkit, or set CUDA_HOME"
        return [*rows, Finding("nvcc", "none", ok=False, fix=fix)]
    return [*rows, Finding("nvcc", f"{_nvcc_version(compiler.compiler)} ({compiler.compiler})")]


def _driver_version() -> str:
    try:
        text = (_DRIVER / "version").read_text()
    except OSError:
        return _first_line(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])
    found = re.search(r"\b\d{3,}\.\d+(\.\d+)?\b", text)
    return found.group() if found else ""


def _nccl_version() -> str:
    import torch
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_nccl_available()):
        return "none"
    try:
        version: Any = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    except (AttributeError, RuntimeError, ImportError):
        return "unknown"
    return ".".join(str(part) for part in version)


def _nvcc_version(compiler: str) -> str:
    found = re.search(r"release (\S+?),", tool_output([compiler, "--version"]))
    return found.group(1) if found else "unknown version"


def _first_line(command: list[str]) -> str:
    return (tool_output(command).splitlines() or [""])[0].strip()
