"""Tecorigin SDAA devices as a polyscale accelerator."""

from __future__ import annotations

from typing import TYPE_CHECKING

from polyscale.hooks import PluginContext, hookimpl

if TYPE_CHECKING:
    from polyscale_sdaa.accelerator import SdaaAccelerator


class SdaaPlugin:
    """Hands over Tecorigin SDAA devices."""

    interface_version = (1, 0)

    @hookimpl
    def polyscale_accelerator(self, context: PluginContext) -> SdaaAccelerator:
        """Make the accelerator."""
        from polyscale_sdaa.accelerator import SdaaAccelerator

        return SdaaAccelerator()
