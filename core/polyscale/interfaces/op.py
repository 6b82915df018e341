"""Op: operators with a PyTorch reference and faster kernels per device type.

Nothing in this repository implements or asks for an op yet: the specification stands so that plugins can be written
against it; building kernels comes with ``csrc/``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable


@dataclass(frozen=True)
class Kernel:
    """One compiled implementation: sources relative to its owner's folder, flags, what must be present."""

    device_type: str
    sources: tuple[str, ...]
    flags: tuple[str, ...] = ()
    requires: tuple[str, ...] = ()


@dataclass(frozen=True)
class Op:
    """An operator: its torch schema, its reference, its kernels."""

    name: str
    schema: str
    reference: Any
    kernels: tuple[Kernel, ...] = field(default_factory=tuple)


@runtime_checkable
class OpLibrary(Protocol):
    """The ops of one owner."""

    name: str

    def ops(self) -> Sequence[Op]:
        """All ops; building none."""
