"""A simulated device that measures memory and injects faults, as a polyscale accelerator."""

from __future__ import annotations

from typing import TYPE_CHECKING

from polyscale.hooks import PluginContext, hookimpl
from polyscale_sim.communication.plugin import SimcclPlugin

if TYPE_CHECKING:
    from polyscale.interfaces.op import OpLibrary
    from polyscale_sim.accelerator import SimAccelerator

__all__ = ["SimOpsPlugin", "SimPlugin", "SimcclPlugin"]


class SimPlugin:
    """Hands over the simulated device."""

    interface_version = (1, 0)

    @hookimpl
    def polyscale_accelerator(self, context: PluginContext) -> SimAccelerator:
        """Make the accelerator."""
        from polyscale_sim.accelerator import SimAccelerator

        return SimAccelerator()


class SimOpsPlugin:
    """Hands over the device's extension, so that it can be built by name; it declares no op."""

    interface_version = (1, 0)

    @hookimpl
    def polyscale_op(self, context: PluginContext) -> OpLibrary:
        """Make the library."""
        from polyscale_sim.library import SimLibrary

        return SimLibrary()
