"""Intel Gaudi (HPU) devices as a polyscale accelerator."""

from __future__ import annotations

from typing import TYPE_CHECKING

from polyscale.hooks import PluginContext, hookimpl

if TYPE_CHECKING:
    from polyscale_hpu.accelerator import HpuAccelerator


class HpuPlugin:
    """Hands over Intel Gaudi (HPU) devices."""

    interface_version = (1, 0)

    @hookimpl
    def polyscale_accelerator(self, context: PluginContext) -> HpuAccelerator:
        """Make the accelerator."""
        from polyscale_hpu.accelerator import HpuAccelerator

        return HpuAccelerator()
