"""CUDA kernels for polyscale: sources, built at first use, or built into the wheel.

Notable: compiled for the oldest architecture that the toolkit knows, with code that a driver translates for newer ones.
"""

from __future__ import annotations

from polyscale.hooks import PluginContext, hookimpl
from polyscale.interfaces.op import OpLibrary

__all__ = ["CudaOpsPlugin"]


class CudaOpsPlugin:
    """Kernels for the ops of ``polyscale_standard.ops``."""

    interface_version = (1, 0)

    @hookimpl
    def polyscale_op(self, context: PluginContext) -> OpLibrary:
        """Hand over sources and kernels."""
        from polyscale_cuda_ops.library import CudaOps

        return CudaOps()
