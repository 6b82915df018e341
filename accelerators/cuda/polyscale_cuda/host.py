"""Driver, devices, toolkit and compiler of the host. Nothing here raises or makes a CUDA context on a healthy host."""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from polyscale.interfaces.accelerator import Finding, Toolchain

_DRIVER = Path("/proc/driver/nvidia")
_INSTALL_DRIVER = "If this machine has an NVIDIA GPU, install its driver"
_USUAL_ROOT = "/usr/local/cuda"
_FLAGS = ("-O3", "-std=c++17", "-Xcompiler", "-fPIC")


def has_driver() -> bool:
    """Whether the driver's library can be loaded."""
    import ctypes

    names = ("nvcuda.dll",) if sys.platform == "win32" else ("libcuda.so.1", "libcuda.so")
    for name in names:
        with contextlib.suppress(OSError):
            ctypes.CDLL(name)
            return True
    return False


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
    if mask is None or devices == 0:
        return ""
    if mask.strip() in ("", "-1", "NoDevFiles"):
        return f"CUDA_VISIBLE_DEVICES={mask!r} hides every device; unset it"
    first = mask.split(",")[0].strip()
    if not first.lstrip("-").isdigit():
        return f"CUDA_VISIBLE_DEVICES={mask!r} names no device of this host; nvidia-smi -L lists them"
    if devices is not None and 0 <= int(first) < devices:
        return ""
    valid = "" if devices is None else f"; this host has {devices}: 0" + (f" to {devices - 1}" if devices > 1 else "")
    return f"CUDA_VISIBLE_DEVICES={mask!r} starts with a device that is absent, which hides every device{valid}"


def initialisation_error() -> str:
    """What CUDA says when it is initialised (an old driver, a failed device); called only where it sees no device."""
    import torch

    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:
        return " ".join(str(error).split())
    return "the driver is loaded and shows no device; see nvidia-smi"


def toolchain(root: str | None) -> Toolchain | None:
    """``nvcc`` below ``root``, on the path, or below the usual root."""
    for candidate in (_below(root), shutil.which("nvcc"), _below(_USUAL_ROOT)):
        if candidate is not None and Path(candidate).is_file():
            return Toolchain(compiler=candidate, flags=_FLAGS, root=str(Path(candidate).resolve().parent.parent))
    return None


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


def _below(root: str | None) -> str | None:
    if root is None:
        return None
    return str(Path(root) / "bin" / ("nvcc.exe" if sys.platform == "win32" else "nvcc"))


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
    found = re.search(r"release (\S+?),", _output([compiler, "--version"]))
    return found.group(1) if found else "unknown version"


def _first_line(command: list[str]) -> str:
    return (_output(command).splitlines() or [""])[0].strip()


def _output(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout if done.returncode == 0 else ""
