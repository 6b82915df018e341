"""The communication plugin ``simccl``: polyscale's collectives over the c10d backend of the simulated device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from polyscale.hooks import PluginContext, hookimpl

if TYPE_CHECKING:
    from polyscale_sim.communication.collectives import SimcclCommunication


class SimcclPlugin:
    """Hands over simccl."""

    interface_version = (1, 0)

    @hookimpl
    def polyscale_communication(self, context: PluginContext) -> SimcclCommunication:
        """Make the collectives."""
        from polyscale_sim.communication.collectives import SimcclCommunication

        return SimcclCommunication()
