"""shm: collectives of ranks on one host through shared memory, as a c10d backend and a polyscale plugin.

Notable: bytes move once where the input lies in memory that ``allocate`` made, and who reads adds while it reads; ranks
compare what they call before a byte moves; groups that span hosts, or that get no shared memory, use gloo.

Read in this order: ``group`` (the c10d interface), ``engine`` (collectives over the transport of ``polyscale_shm``),
``setup`` (how ranks agree), ``fallback`` (gloo), ``work`` (what callers wait for), ``collectives`` (the polyscale
communication), ``memory`` (buffers that peers can read). Importing this package imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from polyscale.hooks import PluginContext, hookimpl

if TYPE_CHECKING:
    from polyscale_communication.collectives import ShmCommunication

NAME = "shm"

__all__ = ["NAME", "ShmPlugin", "register"]


class ShmPlugin:
    """Hands over the collectives through shared memory."""

    interface_version = (1, 0)

    @hookimpl
    def polyscale_communication(self, context: PluginContext) -> ShmCommunication:
        """Make the collectives, with the options ``backends.options.shm``."""
        from polyscale_communication.collectives import ShmCommunication

        return ShmCommunication(context.options, used=context.config is not None)


def register(**options: Any) -> None:
    """Make "shm" a backend of ``torch.distributed`` for host tensors; again: change the options of groups to come.

    Args:
        options: as ``backends.options.shm``; see :class:`polyscale_communication.settings.Settings`.

    Raises:
        ConfigError: there is no such option, or not with this value.
    """
    from polyscale_communication.group import register_backend
    from polyscale_communication.settings import use

    use(options)
    register_backend()
