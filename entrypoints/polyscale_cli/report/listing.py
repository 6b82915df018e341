"""Names of what is installed, from metadata alone: imports neither plugins nor torch."""

from __future__ import annotations

from polyscale.discovery import installed
from polyscale.kinds import KINDS


def listing(kind: str | None = None) -> list[str]:
    """Lines ``kind=name`` of every installed plugin, in the order of kinds, as ``--require`` takes them."""
    kinds = KINDS if kind is None else (kind,)
    return [f"{each}={name}" for each in kinds for name in sorted({entry.name for entry in installed(each)})]
