"""The op library ``sim``: no op, one module, the extension of the device, so that ``scale build`` can make it ahead."""

from __future__ import annotations

from collections.abc import Sequence

from polyscale.interfaces.op import Kernel, KernelModule, Op


class SimLibrary:
    """The extension of the simulated device."""

    name = "sim"

    def ops(self) -> Sequence[Op]:
        """None."""
        return ()

    def modules(self) -> Sequence[KernelModule]:
        """The device's extension."""
        from polyscale_sim.device import MODULE

        return (MODULE,)

    def kernels(self) -> Sequence[Kernel]:
        """None: operators run on the CPU's kernels, or on their references."""
        return ()
