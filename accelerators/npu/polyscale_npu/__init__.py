"""Huawei Ascend NPUs as a polyscale accelerator."""

from __future__ import annotations

from typing import TYPE_CHECKING

from polyscale.hooks import PluginContext, hookimpl

if TYPE_CHECKING:
    from polyscale_npu.accelerator import NpuAccelerator


class NpuPlugin:
    """Hands over Huawei Ascend NPUs."""

    interface_version = (1, 0)

    @hookimpl
    def polyscale_accelerator(self, context: PluginContext) -> NpuAccelerator:
        """Make the accelerator."""
        from polyscale_npu.accelerator import NpuAccelerator

        return NpuAccelerator()
