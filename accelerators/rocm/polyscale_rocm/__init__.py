"""AMD ROCm devices as a polyscale accelerator."""

from __future__ import annotations

from typing import TYPE_CHECKING

from polyscale.hooks import PluginContext, hookimpl

if TYPE_CHECKING:
    from polyscale_rocm.accelerator import RocmAccelerator


class RocmPlugin:
    """Hands over AMD ROCm devices."""

    interface_version = (1, 0)

    @hookimpl
    def polyscale_accelerator(self, context: PluginContext) -> RocmAccelerator:
        """Make the accelerator."""
        from polyscale_rocm.accelerator import RocmAccelerator

        return RocmAccelerator()
