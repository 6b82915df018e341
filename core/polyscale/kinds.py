"""The table of plugin kinds: what each is called, where it is found, which interface version core speaks.

A plugin written for ``(major, minor)`` is accepted when its major equals core's and its minor is not newer: Protocols
grow only by base-class defaults, so an older minor keeps working.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any


@dataclass(frozen=True)
class Kind:
    """One kind of plugin.

    Attributes:
        name: singular name, as in errors and ``scale-report --kind``.
        version: interface version ``(major, minor)`` that core speaks.
        protocol: ``module:class`` of the Protocol that the handed-over object must satisfy.
    """

    name: str
    version: tuple[int, int]
    protocol: str

    @property
    def group(self) -> str:
        """Entry-point group."""
        return f"polyscale.{self.name}"

    @property
    def hook(self) -> str:
        """Name of the hook."""
        return f"polyscale_{self.name}"

    @property
    def plural(self) -> str:
        """Key of this kind in ``scale-report --json``."""
        return self.name + "s"

    def protocol_type(self) -> Any:
        """Import and return the Protocol class."""
        module, _, attribute = self.protocol.partition(":")
        return getattr(import_module(module), attribute)


_INTERFACES = "polyscale.interfaces"

KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind("accelerator", (1, 0), f"{_INTERFACES}.accelerator:Accelerator"),
        Kind("communication", (1, 0), f"{_INTERFACES}.communication:Communication"),
        Kind("optimizer", (1, 0), f"{_INTERFACES}.optimizer:OptimizerFactory"),
        Kind("precision", (1, 0), f"{_INTERFACES}.precision:Precision"),
        Kind("parallelism", (1, 0), f"{_INTERFACES}.parallelism:Parallelism"),
        Kind("io", (1, 0), f"{_INTERFACES}.io:FileIO"),
        Kind("checkpoint", (1, 0), f"{_INTERFACES}.checkpoint:CheckpointStorage"),
        Kind("launcher", (1, 0), f"{_INTERFACES}.launcher:Launcher"),
        Kind("observer", (1, 0), f"{_INTERFACES}.observer:Observer"),
        Kind("op", (1, 0), f"{_INTERFACES}.op:OpLibrary"),
    )
}
