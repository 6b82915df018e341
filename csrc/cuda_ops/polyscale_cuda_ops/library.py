"""What is compiled, and which ops it has kernels for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from polyscale.interfaces.op import Kernel, KernelModule, Op, Source

NAME = "cuda_ops"
OPS = ("fused_adam_", "sum_of_squares", "add_scaled_", "fill_")

MODULE = KernelModule(
    name=NAME,
    folder=Path(__file__).parent / "kernels",
    device_type="cuda",
    sources=(Source("binding.cpp", flags=("-O1",)), Source("ops.cu")),
    prebuilt=Path(__file__).parent / "prebuilt",
)


class CudaOps:
    """The kernels of CUDA devices."""

    name = NAME

    def ops(self) -> Sequence[Op]:
        """See :class:`polyscale.interfaces.op.OpLibrary`; the ops are declared by ``polyscale_standard.ops``."""
        return ()

    def modules(self) -> Sequence[KernelModule]:
        """See :class:`polyscale.interfaces.op.OpLibrary`."""
        return (MODULE,)

    def kernels(self) -> Sequence[Kernel]:
        """See :class:`polyscale.interfaces.op.OpLibrary`."""
        return [Kernel(op, "cuda", NAME, _implementation(op)) for op in OPS]


def _implementation(op: str) -> Callable[[Any], Callable[..., Any]]:
    def make(extension: Any) -> Callable[..., Any]:
        from polyscale_cuda_ops.wrappers import Wrappers

        function: Callable[..., Any] = getattr(Wrappers(extension), op)
        return function

    return make
