"""Op: operators with a PyTorch reference, and faster kernels for them per device type.

Notable: who declares an op and who has a kernel for it may be two libraries: the standard plugins hold the references,
a package of ``csrc/`` the kernels of one device type. Declaring builds and imports nothing; ``polyscale.ops.use`` does,
when an op is first asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable


@dataclass(frozen=True)
class Source:
    """One file to compile.

    Attributes:
        path: relative to the folder of its module.
        flags: what the compiler is given in addition, such as an instruction set.
        machines: ``platform.machine()`` in lower case of those it is for ("x86_64", "aarch64"); empty: all.
    """

    path: str
    flags: tuple[str, ...] = ()
    machines: tuple[str, ...] = ()


@dataclass(frozen=True)
class KernelModule:
    """Sources that become one Python extension.

    Attributes:
        name: the extension's name, that of its ``PYBIND11_MODULE``.
        folder: where its files are.
        device_type: whose accelerator names the compiler; "cpu": the host's.
        sources: what is compiled. ``.cpp`` goes to the host's compiler, everything else to the device's.
        headers: patterns of files below ``folder`` that are included; they count for the cache.
        flags: what the compiler is given for all sources.
        link_flags: what the linker is given.
        torch_headers: it includes headers of torch, so that a build fits one version of torch only.
        ahead: ``scale build --all`` builds it.
        prebuilt: folder of a wheel in which a build may lie, looked at first; None: there is none.
    """

    name: str
    folder: Path
    device_type: str
    sources: tuple[Source, ...]
    headers: tuple[str, ...] = ("**/*.h",)
    flags: tuple[str, ...] = ()
    link_flags: tuple[str, ...] = ()
    torch_headers: bool = False
    ahead: bool = True
    prebuilt: Path | None = None


@dataclass(frozen=True)
class Op:
    """An operator of the namespace ``polyscale``.

    Attributes:
        name: without namespace; in-place operators end in ``_``.
        schema: arguments and result in torch's schema language, without the name: "(Tensor(a!) x, float s) -> ()".
        reference: PyTorch code that takes these arguments on any device.
    """

    name: str
    schema: str
    reference: Callable[..., Any]


@dataclass(frozen=True)
class Kernel:
    """A faster implementation of an op for one device type.

    Attributes:
        op: name of the op, of this library or another.
        device_type: of the tensors it takes.
        module: name of the ``KernelModule`` of the same library that has it.
        implementation: given the imported extension, returns a function with the op's arguments.
    """

    op: str
    device_type: str
    module: str
    implementation: Callable[[Any], Callable[..., Any]]


@runtime_checkable
class OpLibrary(Protocol):
    """The ops and kernels of one owner. None of these methods builds or imports anything."""

    name: str

    def ops(self) -> Sequence[Op]:
        """Operators declared here, with their references."""

    def modules(self) -> Sequence[KernelModule]:
        """What can be compiled."""

    def kernels(self) -> Sequence[Kernel]:
        """Kernels for operators declared here or elsewhere."""
