"""Driver, CANN, devices and compiler of the host. Nothing here raises or touches a device."""

from __future__ import annotations

import contextlib
import re
from itertools import takewhile
from pathlib import Path

from polyscale import device_host
from polyscale.device_host import compiler_row, files, find_compiler, first_line, version_in
from polyscale.discovery.requirements import version_of
from polyscale.interfaces.accelerator import Finding, Toolchain

_USUAL_ROOT = "/usr/local/Ascend/ascend-toolkit/latest"
_DRIVER_INFO = "/usr/local/Ascend/driver/version.info"
_FLAGS = ("-O3", "-std=c++17", "-fPIC")


def has_driver() -> bool:
    """Whether the driver is loaded and reachable."""
    return bool(files("/dev/davinci_manager"))


def physical_devices() -> int:
    """Device files of this host or container."""
    return len(files("/dev/davinci[0-9]*"))


def explain_mask(mask: str | None, devices: int) -> str:
    """Say why ``ASCEND_RT_VISIBLE_DEVICES`` leaves no device; "" where it is not the cause.

    A list without spaces, in ascending order, read up to the first entry that is not a device
    (https://www.hiascend.com/document/detail/zh/canncommercial/900/maintenref/envvar/envref_07_0028.html).
    """
    said = device_host.explain_mask("ASCEND_RT_VISIBLE_DEVICES", mask, devices)
    if said or mask is None:
        return said
    read = takewhile(lambda entry: entry.isdecimal() and int(entry) < devices, mask.split(","))
    numbers = [int(entry) for entry in read]
    if numbers != sorted(set(numbers)):
        return f"ASCEND_RT_VISIBLE_DEVICES={mask!r} is not in ascending order, which hides every device"
    return ""


def toolchain(root: str | None) -> Toolchain | None:
    """The BiSheng compiler (``bisheng``, earlier ``ccec``) of CANN below ``root``, on the path, or at the usual place.

    Source of the folder: https://www.hiascend.com/document/detail/zh/CANNCommunityEdition/83RC1alpha002/opdevg/cceintrinsicguide/cceprogram_0003.html
    """
    folders = [f"{one}/compiler/ccec_compiler/bin" for one in (root, _USUAL_ROOT) if one]
    newer = find_compiler("bisheng", folders, _FLAGS, root="../../..")
    return newer or find_compiler("ccec", folders, _FLAGS, root="../../..")


def findings(root: str | None, compiler: Toolchain | None) -> list[Finding]:
    """Rows of the report: driver, CANN, the plugin of torch, compiler."""
    driver = version_in(first_line(_DRIVER_INFO)) or ("unknown version" if has_driver() else "none")
    cann = _cann_version(root or _USUAL_ROOT)
    plugin = version_of("torch-npu")
    no_cann = "Install CANN, and run `source set_env.sh` in its folder"
    return [
        Finding("driver", driver, ok=has_driver(), fix="" if has_driver() else "Install the driver and the firmware"),
        Finding("CANN", cann or "none", ok=bool(cann), fix="" if cann else no_cann),
        Finding("torch-npu", plugin or "none", ok=plugin is not None),
        compiler_row("bisheng", compiler, "install the toolkit of CANN"),
    ]


def _cann_version(root: str) -> str:
    """What CANN's own install record says (a line ``version=...``)."""
    for pattern in ("ascend_*_install.info", "*/ascend_*_install.info"):
        for path in files(f"{root}/{pattern}"):
            with contextlib.suppress(OSError):
                found = re.search(r"^version=(.+)$", Path(path).read_text("utf-8", "replace"), flags=re.MULTILINE)
                if found:
                    return found[1].strip()
    return ""
