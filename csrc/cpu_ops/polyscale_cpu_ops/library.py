"""What is compiled, with which flags, and which ops it has kernels for.

Notable: each instruction set has its own file and flags, and only that file has them; the rest is for the baseline of
the architecture. Floating-point expressions are not contracted, so a result does not depend on the compiler.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from polyscale.interfaces.op import Kernel, KernelModule, Op, Source

NAME = "cpu_ops"
OPS = ("fused_adam_", "sum_of_squares", "add_scaled_", "fill_")

_X86 = ("x86_64",)
_ARM = ("aarch64", "arm64")
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl")

MODULE = KernelModule(
    name=NAME,
    folder=Path(__file__).parent / "kernels",
    device_type="cpu",
    sources=(
        Source("binding.cpp", flags=("-O1",)),  # it forwards, and is what takes longest to compile
        Source("dispatch.cpp"),
        Source("threads.cpp"),
        Source("scalar.cpp", flags=("-O3",)),
        Source("avx2.cpp", flags=_AVX2, machines=_X86),
        Source("avx512.cpp", flags=_AVX512, machines=_X86),
        Source("neon.cpp", machines=_ARM),
    ),
    flags=("-std=c++17", "-O2", "-pthread", "-fno-math-errno", "-ffp-contract=off"),
    link_flags=("-pthread",),
    prebuilt=Path(__file__).parent / "prebuilt",
)


class CpuOps:
    """The kernels of the CPU."""

    name = NAME

    def ops(self) -> Sequence[Op]:
        """See :class:`polyscale.interfaces.op.OpLibrary`; the ops are declared by ``polyscale_standard.ops``."""
        return ()

    def modules(self) -> Sequence[KernelModule]:
        """See :class:`polyscale.interfaces.op.OpLibrary`."""
        return (MODULE,)

    def kernels(self) -> Sequence[Kernel]:
        """See :class:`polyscale.interfaces.op.OpLibrary`."""
        return [Kernel(op, "cpu", NAME, _implementation(op)) for op in OPS]


def _implementation(op: str) -> Callable[[Any], Callable[..., Any]]:
    def make(extension: Any) -> Callable[..., Any]:
        from polyscale_cpu_ops.wrappers import Wrappers

        function: Callable[..., Any] = getattr(Wrappers(extension), op)
        return function

    return make
