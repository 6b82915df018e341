"""The CPU as a polyscale accelerator."""

from __future__ import annotations

from typing import TYPE_CHECKING

from polyscale.hooks import PluginContext, hookimpl

if TYPE_CHECKING:
    from polyscale_cpu.accelerator import CpuAccelerator


class CpuPlugin:
    """Hands over the CPU."""

    interface_version = (1, 0)

    @hookimpl
    def polyscale_accelerator(self, context: PluginContext) -> CpuAccelerator:
        """Make the accelerator."""
        from polyscale_cpu.accelerator import CpuAccelerator

        return CpuAccelerator()
