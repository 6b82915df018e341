"""Driver, devices and compiler of the host. Nothing here raises or touches a device that works."""

from __future__ import annotations

from pathlib import Path

from polyscale.device_host import can_open, compiler_row, explain_mask, files, find_compiler, first_line
from polyscale.interfaces.accelerator import Finding, Toolchain

# The kernel's compute driver: https://docs.kernel.org/gpu/amdgpu/index.html; what a container must be given:
# https://rocm.docs.amd.com/projects/install-on-linux/en/latest/how-to/docker.html
_DRIVER_FILE = "/dev/kfd"
_NODES = "/sys/class/kfd/kfd/topology/nodes/*/gpu_id"
_USUAL_ROOT = "/opt/rocm"
_FLAGS = ("-O3", "-std=c++17", "-fPIC")


def has_driver() -> bool:
    """Whether the compute driver is loaded and reachable."""
    return bool(files(_DRIVER_FILE))


def may_use_driver() -> bool:
    """Whether this user may open it."""
    return can_open(_DRIVER_FILE)


def physical_devices() -> int | None:
    """GPUs of this host, masked or not; None where the driver does not tell. Processors are nodes with the id 0."""
    nodes = files(_NODES)
    return sum(first_line(node) not in ("", "0") for node in nodes) if nodes else None


def explain_masks(masks: dict[str, str], devices: int | None) -> str:
    """Say which of the variables leaves no device; "" where none does."""
    for name, value in masks.items():
        if said := explain_mask(name, value, devices):
            return said
        devices = min(devices, len(value.split(","))) if devices is not None else None
    return ""


def initialisation_error(masks: dict[str, str]) -> str:
    """What HIP says when it is initialised; called only where it sees no device.

    Masks that are set are told with it: they may name devices by identifiers, of which none is here.
    """
    import torch

    said = "the driver is loaded and shows no device; see rocminfo"
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:
        said = " ".join(str(error).split())
    told = ", ".join(f"{name}={value!r}" for name, value in masks.items())
    return f"{said} (with {told}; rocminfo lists the devices)" if told else said


def toolchain(root: str | None) -> Toolchain | None:
    """``hipcc`` below ``root``, on the path, or below the usual root."""
    folders = [str(Path(one) / "bin") for one in (root, _USUAL_ROOT) if one]
    return find_compiler("hipcc", folders, _FLAGS)


def findings(compiler: Toolchain | None) -> list[Finding]:
    """Rows of the report: driver, what torch was built with, compiler."""
    import torch

    fix = "" if has_driver() else "If this machine has an AMD GPU, install its driver (amdgpu)"
    version = first_line("/sys/module/amdgpu/version") or ("that of the kernel" if has_driver() else "none")
    hip = torch.version.hip
    return [
        Finding("driver", version, ok=not fix, fix=fix),
        Finding("ROCm of torch", hip or "none", ok=hip is not None),
        Finding("RCCL of torch", _rccl_version()),
        compiler_row("hipcc", compiler, "install the ROCm toolkit, or set ROCM_PATH"),
    ]


def _rccl_version() -> str:
    import torch
    import torch.distributed as dist

    if torch.version.hip is None or not (dist.is_available() and dist.is_nccl_available()):
        return "none"
    try:
        return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    except (AttributeError, RuntimeError, ImportError):
        return "unknown"
