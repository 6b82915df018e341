"""What core keeps about each parameter, whatever shards it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class ParamInfo:
    """One logical parameter.

    Attributes:
        fqn: its name in the whole model; of tied names, the first.
        shape: its full shape.
        dtype: dtype of its master.
        requires_grad: whether it is trained.
        mesh: the model-parallel DeviceMesh it is a DTensor on before data parallelism, or None.
        placements: its placements on ``mesh``.
        multiplicity: how many ranks of the world hold each element of its gradient after reduction.
        tied_to: other names of the same parameter.
    """

    fqn: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    mesh: Any = None
    placements: tuple[Any, ...] = ()
    multiplicity: int = 1
    tied_to: tuple[str, ...] = field(default_factory=tuple)

    @property
    def names(self) -> tuple[str, ...]:
        """All names, the canonical one first."""
        return (self.fqn, *self.tied_to)
