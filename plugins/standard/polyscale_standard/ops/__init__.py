"""Ops that training stands on, with PyTorch references: Adam over buffers, sums of squares, scaled conversion.

Notable: a reference takes any device, floating dtype and strides, so every kernel may hand it what it does not cover.
Kernels are in packages of their own (``polyscale-cpu-ops``), which share the checks of arguments in ``checks``.
"""

from polyscale_standard.ops.library import StandardOpsPlugin

__all__ = ["StandardOpsPlugin"]
