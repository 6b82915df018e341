"""What is compiled, and with which flags.

Notable: each instruction set of the sums has its own file and flags, and only that file has them. Floating-point
expressions are not contracted, so a sum does not depend on the processor.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from polyscale.interfaces.op import Kernel, KernelModule, Op, Source

NAME = "shm"

_X86 = ("x86_64",)
_AVX2 = ("-O3", "-mavx2", "-mf16c")

MODULE = KernelModule(
    name="polyscale_shm_native",
    folder=Path(__file__).parent / "kernels",
    device_type="cpu",
    sources=(
        Source("binding.cpp", flags=("-O1",)),  # it forwards, and is what takes longest to compile
        Source("memory.cpp"),
        Source("peers.cpp"),
        Source("waiting.cpp"),
        Source("group.cpp"),
        Source("collectives.cpp"),
        Source("pairs.cpp"),
        Source("lane.cpp"),
        Source("sums.cpp"),
        Source("sums_base.cpp", flags=("-O3",)),
        Source("sums_avx2.cpp", flags=_AVX2, machines=_X86),
    ),
    flags=("-std=c++17", "-O2", "-pthread", "-fwrapv", "-fno-math-errno", "-ffp-contract=off"),
    link_flags=("-pthread",),
    prebuilt=Path(__file__).parent / "prebuilt",
)


class Shm:
    """The transport; it has no operators."""

    name = NAME

    def ops(self) -> Sequence[Op]:
        """See :class:`polyscale.interfaces.op.OpLibrary`."""
        return ()

    def modules(self) -> Sequence[KernelModule]:
        """See :class:`polyscale.interfaces.op.OpLibrary`."""
        return (MODULE,)

    def kernels(self) -> Sequence[Kernel]:
        """See :class:`polyscale.interfaces.op.OpLibrary`."""
        return ()
