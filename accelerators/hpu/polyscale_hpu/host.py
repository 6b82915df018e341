"""Driver and devices of the host. Nothing here raises or touches a device."""

from __future__ import annotations

from polyscale.device_host import files, first_line, version_in
from polyscale.discovery.requirements import version_of
from polyscale.interfaces.accelerator import Finding

# Files of the kernel driver: Documentation/ABI/testing/sysfs-driver-habanalabs of Linux.
_DRIVER = "/sys/module/habanalabs"
_MODULE_IDS = "/sys/class/accel/accel*/device/module_id"
_DRIVER_VERSION = "/sys/class/accel/accel*/device/driver_ver"
PLUGIN = "habana-torch-plugin"


def has_driver() -> bool:
    """Whether the driver is loaded."""
    return bool(files(_DRIVER))


def module_ids() -> list[str]:
    """Module ids of the devices, by which the mask names them."""
    return [first_line(path) for path in files(_MODULE_IDS)]


def explain_mask(mask: str | None, ids: list[str]) -> str:
    """Say why ``HABANA_VISIBLE_MODULES`` leaves no device; "" where it is not the cause.

    A list of module ids (https://docs.habana.ai/en/latest/Orchestration/Multiple_Tenants_on_HPU/index.html), which
    are not indices: ``hl-smi -Q index,module_id -f csv`` shows both.
    """
    if mask is None or not ids:
        return ""
    named = [entry.strip() for entry in mask.split(",") if entry.strip()]
    if not named:
        return f"HABANA_VISIBLE_MODULES={mask!r} hides every device; unset it"
    if set(named) & set(ids):
        return ""
    return f"HABANA_VISIBLE_MODULES={mask!r} names only modules that are absent; this host has {', '.join(sorted(ids))}"


def findings() -> list[Finding]:
    """Rows of the report: driver, the plugin of torch."""
    driver = version_in(first_line(_DRIVER_VERSION)) or ("unknown version" if has_driver() else "none")
    plugin = version_of(PLUGIN)
    return [
        Finding("driver", driver, ok=has_driver(), fix="" if has_driver() else "Install the driver habanalabs"),
        Finding(PLUGIN, plugin or "none", ok=plugin is not None),
    ]
