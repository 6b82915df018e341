"""Lion: the sign of an interpolation of momentum and gradient.

Notable: the defaults are DeepSpeed's (betas 0.9 and 0.999; the paper's are 0.9 and 0.99). Chen et al. 2023, "Symbolic
Discovery of Optimization Algorithms", Algorithm 2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from polyscale.hooks import PluginContext, hookimpl
from polyscale.interfaces.optimizer import Granularity, OptimizerGroup
from polyscale_standard.optimizers import hyper
from polyscale_standard.optimizers.torch_groups import torch_groups

if TYPE_CHECKING:
    import torch

    from polyscale.parameters.store import ParameterStore

_HYPERS = {
    "lr": hyper.number(1e-3),
    "betas": hyper.betas((0.9, 0.999)),
    "weight_decay": hyper.number(0.0),
}


class LionFactory:
    """Makes Lion."""

    name = "lion"
    granularity: Granularity = "element"

    def check(self, params: dict[str, Any]) -> dict[str, Any]:
        """See :class:`polyscale.interfaces.optimizer.OptimizerFactory`.

        Raises:
            ConfigError: a hyper-parameter is unknown or out of range.
        """
        return hyper.check(self.name, _HYPERS, params)

    def check_group(self, options: dict[str, Any]) -> dict[str, Any]:
        """Return the hyper-parameters of one parameter group, only those given.

        Raises:
            ConfigError: one is unknown, out of range, or holds for the whole optimizer only.
        """
        return hyper.check_group(self.name, _HYPERS, options)

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
