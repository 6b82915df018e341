"""Optimizer: a factory of ``torch.optim.Optimizer`` objects, and the granularity at which its mathematics works.

``element``: every element is updated by itself, so it may be given any fragment of a parameter as a flat local tensor.
``norm``: it needs norms of whole parameters or updates besides, and asks the store for them (``ParameterStore.norms``);
it is given local fragments. ``matrix``: it needs whole matrices, and gathers them through the store; it is given local
fragments. ``tensor``: it looks at whole parameters by itself; it is given what the data-parallel plugin calls a
parameter (a DTensor under fsdp2, whose norms are global), and refused where that is a flat range of one. An unknown
class counts as ``tensor``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch

    from polyscale.parameters.store import ParameterStore

Granularity = Literal["element", "norm", "matrix", "tensor"]


@dataclass
class OptimizerGroup:
    """Parameters that share hyper-parameters.

    Attributes:
        params: name -> what the optimizer updates (see granularity); fp32 or fp64 masters.
        options: hyper-parameters of this group, which win over the optimizer's own.
    """

    params: dict[str, torch.nn.Parameter]
    options: dict[str, Any] = field(default_factory=dict)


@runtime_checkable
class OptimizerFactory(Protocol):
    """Makes one optimizer. A factory may also have ``check_group(options)``, which checks the hyper-parameters of one
    group as ``check`` does those of the optimizer.

    Attributes:
        name: the plugin's name ("adamw").
        granularity: see the module.
    """

    name: str
    granularity: Granularity

    def check(self, params: dict[str, Any]) -> dict[str, Any]:
        """Return the hyper-parameters, defaults filled in.

        Raises:
            ConfigError: one is unknown (nearest name) or out of range.
        """

    def build(
        self, groups: list[OptimizerGroup], params: dict[str, Any], store: ParameterStore
    ) -> torch.optim.Optimizer:
        """Make the optimizer over ``groups``. Collective where granularity is ``matrix``."""
