"""The transport of polyscale's shared-memory collectives: C++ sources, built at first use, or built into the wheel.

Notable: it knows addresses, sizes and numbers, and nothing of torch; ``polyscale_communication`` makes a c10d backend
of it. The instruction set of the sums (AVX2, or the baseline) is chosen when the extension is loaded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from polyscale.hooks import PluginContext, hookimpl

if TYPE_CHECKING:
    from polyscale.interfaces.op import OpLibrary

__all__ = ["ShmOpsPlugin", "native"]


class ShmOpsPlugin:
    """Names the extension, so that ``scale build`` makes it and the report shows it."""

    interface_version = (1, 0)

    @hookimpl
    def polyscale_op(self, context: PluginContext) -> OpLibrary:
        """Hand over the sources."""
        from polyscale_shm.library import Shm

        return Shm()


def native() -> Any:
    """The extension; it is built now where it has not been built yet.

    Raises:
        BuildError: it cannot be built here.
    """
    from polyscale.ops import load_module
    from polyscale_shm.library import MODULE

    return load_module(MODULE)
