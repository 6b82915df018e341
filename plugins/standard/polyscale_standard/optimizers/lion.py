"""Lion: the sign of an interpolation of momentum and gradient.

Notable: the defaults are DeepSpeed's (betas 0.9 and 0.999; the paper's are 0.9 and 0.99). Chen et al. 2023, "Symbolic
Discovery of Optimization Algorithms", Algorithm 2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from polyscale.hooks import PluginContext, hookimpl
from polyscale.interfaces.optimizer import Granularity, OptimizerGroup
from polyscale_standard.optimizers import hyper
from polyscale_standard.optimizers.factory import TableFactory
from polyscale_standard.optimizers.torch_groups import torch_groups

if TYPE_CHECKING:
    import torch

    from polyscale.parameters.store import ParameterStore

_HYPERS = {
    "lr": hyper.number(1e-3),
    "betas": hyper.betas((0.9, 0.999)),
    "weight_decay": hyper.number(0.0),
}


class LionFactory(TableFactory):
    """Makes Lion."""

    hypers = _HYPERS
    name = "lion"
    granularity: Granularity = "element"

    def build(
        self, groups: list[OptimizerGroup], params: dict[str, Any], store: ParameterStore | None = None
    ) -> torch.optim.Optimizer:
        """Make the optimizer over local tensors of any shape."""
        from polyscale_standard.optimizers.lion_step import Lion

        made = torch_groups(groups, lambda group: self.check_group(group.options))
        return Lion(made, **self.check(params))


class LionPlugin:
    """Lion."""

    interface_version = (1, 0)

    @hookimpl
    def polyscale_optimizer(self, context: PluginContext) -> LionFactory:
        """Hand over the factory of Lion."""
        return LionFactory()
