"""Kernels of the CPU for polyscale: sources, built at first use, or built into the wheel.

Notable: the instruction set (AVX-512, AVX2, NEON, or none) is chosen when the extension is loaded, so one build runs on
every processor of its architecture. Only ``wrappers`` imports torch.
"""

from __future__ import annotations

from polyscale.hooks import PluginContext, hookimpl
from polyscale.interfaces.op import OpLibrary

__all__ = ["CpuOpsPlugin"]


class CpuOpsPlugin:
    """Kernels for the ops of ``polyscale_standard.ops``."""

    interface_version = (1, 0)

    @hookimpl
    def polyscale_op(self, context: PluginContext) -> OpLibrary:
        """Hand over sources and kernels."""
        from polyscale_cpu_ops.library import CpuOps

        return CpuOps()
