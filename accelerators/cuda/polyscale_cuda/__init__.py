"""NVIDIA CUDA devices as a polyscale accelerator."""

from __future__ import annotations

from typing import TYPE_CHECKING

from polyscale.hooks import PluginContext, hookimpl

if TYPE_CHECKING:
    from polyscale_cuda.accelerator import CudaAccelerator


class CudaPlugin:
    """Hands over CUDA devices."""

    interface_version = (1, 0)

    @hookimpl
    def polyscale_accelerator(self, context: PluginContext) -> CudaAccelerator:
        """Make the accelerator."""
        from polyscale_cuda.accelerator import CudaAccelerator

        return CudaAccelerator()
