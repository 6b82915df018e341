"""Driver, Level Zero, devices and compiler of the host. Nothing here raises or touches a device."""

from __future__ import annotations

from pathlib import Path

from polyscale.device_host import can_load, can_open, compiler_row, files, find_compiler, first_line
from polyscale.discovery.requirements import version_of
from polyscale.interfaces.accelerator import Finding, Toolchain

_VENDOR = "0x8086"  # Intel's number on the PCI bus
_OLD_EXTENSION = "intel-extension-for-pytorch"
_USUAL_ROOT = "/opt/intel/oneapi/compiler/latest"
# -fsycl compiles and links SYCL: https://www.intel.com/content/www/us/en/docs/dpcpp-cpp-compiler/developer-guide-reference
_FLAGS = ("-fsycl", "-O3", "-std=c++17", "-fPIC")


def nodes() -> list[str]:
    """Device files of Intel GPUs."""
    return [
        f"/dev/dri/{Path(node).parents[1].name}"
        for node in files("/sys/class/drm/renderD*/device/vendor")
        if first_line(node) == _VENDOR
    ]


def may_use(devices: list[str]) -> bool:
    """Whether this user may open one of them."""
    return any(can_open(device) for device in devices)


def has_level_zero() -> bool:
    """Whether the loader of Level Zero, through which torch reaches the devices, can be loaded."""
    return can_load("libze_loader.so.1", "ze_loader.dll")


def explain_mask(mask: str | None, devices: int) -> str:
    """Say why ``ZE_AFFINITY_MASK`` leaves no device; "" where it is not the cause.

    It lists devices ("0,2") or parts of them ("0.1"); what is absent is ignored
    (https://oneapi-src.github.io/level-zero-spec/level-zero/latest/core/PROG.html#affinity-mask). Unless
    ``ZE_FLAT_DEVICE_HIERARCHY`` is "COMPOSITE", each tile of a GPU is a device, so indices may go beyond the GPUs.

    Args:
        mask: its value; None: not set.
        devices: GPUs of this host.
    """
    if mask is None:
        return ""
    if mask.strip() == "":
        return f"ZE_AFFINITY_MASK={mask!r} hides every device; unset it"
    first = [entry.strip().partition(".")[0] for entry in mask.split(",")]
    if any(entry.isdigit() and int(entry) < devices for entry in first):
        return ""
    return (
        f"torch sees no device with ZE_AFFINITY_MASK={mask!r}; GPUs of this host: {devices}, numbered from 0 (each "
        "tile of a GPU has a number, unless ZE_FLAT_DEVICE_HIERARCHY is COMPOSITE); sycl-ls lists them"
    )


def toolchain(roots: list[str]) -> Toolchain | None:
    """``icpx`` below ``roots``, on the path, or below the usual root."""
    return find_compiler("icpx", [str(Path(root) / "bin") for root in (*roots, _USUAL_ROOT)], _FLAGS)


def findings(compiler: Toolchain | None) -> list[Finding]:
    """Rows of the report: driver, Level Zero, what torch was built with, an extension that is in the way, compiler."""
    import torch

    module = next((name for name in ("xe", "i915") if files(f"/sys/module/{name}")), "")
    zero = has_level_zero()
    rows = [
        Finding("driver", module or "none", ok=bool(module), fix="" if module else "Install the driver of the GPU"),
        Finding(
            "Level Zero", "found" if zero else "none", ok=zero, fix="" if zero else "Install the Level Zero loader"
        ),
        Finding("XPU of torch", torch.version.xpu or "none", ok=torch.version.xpu is not None),
    ]
    if old := version_of(_OLD_EXTENSION):
        # It ended with 2.8 and ends a process that has another torch, so it is never imported.
        fix = f"torch.xpu needs no extension: pip uninstall {_OLD_EXTENSION}"
        rows.append(Finding(_OLD_EXTENSION, old, ok=False, fix=fix))
    return [*rows, compiler_row("icpx", compiler, "install the oneAPI DPC++ compiler, or source its setvars.sh")]
