"""Intel GPUs (XPU) as a polyscale accelerator."""

from __future__ import annotations

from typing import TYPE_CHECKING

from polyscale.hooks import PluginContext, hookimpl

if TYPE_CHECKING:
    from polyscale_xpu.accelerator import XpuAccelerator


class XpuPlugin:
    """Hands over Intel GPUs (XPU)."""

    interface_version = (1, 0)

    @hookimpl
    def polyscale_accelerator(self, context: PluginContext) -> XpuAccelerator:
        """Make the accelerator."""
        from polyscale_xpu.accelerator import XpuAccelerator

        return XpuAccelerator()
