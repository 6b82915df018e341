"""Precision: which dtype each copy of the numbers has, and whether the loss is scaled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class PrecisionPolicy:
    """Dtypes of one engine. None: the master's own.

    Attributes:
        parameter: compute dtype of parameters and of floating-point inputs; None leaves the master's dtype.
        master: dtype of what the optimizer updates; None: fp32, or fp64 for a parameter that is fp64.
        accumulation: dtype in which gradients of micro-steps are added.
        reduction: dtype in which gradients are summed over ranks.
        pinned: parameters that compute in the master's dtype. A name with a wildcard is a pattern (fnmatch) on
            parameter names; a plain name is that module or parameter at any depth, and all below it.
        pinned_exactly: full names of further ones, which may match nothing.
    """

    parameter: torch.dtype | None = None
    master: torch.dtype | None = None
    accumulation: torch.dtype | None = None
    reduction: torch.dtype | None = None
    pinned: tuple[str, ...] = ()
    pinned_exactly: tuple[str, ...] = ()


class LossScaler(Protocol):
    """Scales the loss of fp16 training, and follows overflows. Pure state, no tensors, no communication."""

    @property
    def scale(self) -> float:
        """The factor on the loss of the coming micro-steps."""

    def update(self, overflow: bool) -> None:
        """Take the outcome of one update, agreed by all ranks."""

    @property
    def exhausted(self) -> bool:
        """Whether so many updates were skipped at the floor that training cannot go on."""

    def state_dict(self) -> dict[str, Any]:
        """State for a checkpoint."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore it."""


@runtime_checkable
class Precision(Protocol):
    """Dtypes and loss scaling under one name ("bf16")."""

    name: str

    def policy(self) -> PrecisionPolicy:
        """Dtypes, from the configuration the plugin was made with."""

    def scaler(self) -> LossScaler | None:
        """A fresh loss scaler; None where the loss is not scaled."""
