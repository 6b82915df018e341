"""Adagrad, over ``torch.optim.Adagrad`` (Duchi, Hazan and Singer 2011)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from polyscale.errors import UnsupportedError
from polyscale.hooks import PluginContext, hookimpl
from polyscale.interfaces.optimizer import Granularity, OptimizerGroup
from polyscale_standard.optimizers import hyper
from polyscale_standard.optimizers.factory import TableFactory
from polyscale_standard.optimizers.torch_groups import make, torch_groups

if TYPE_CHECKING:
    import torch

    from polyscale.parameters.store import ParameterStore

_HYPERS = {
    "lr": hyper.number(1e-2),
    "lr_decay": hyper.number(0.0),
    "weight_decay": hyper.number(0.0),
    "initial_accumulator_value": hyper.number(0.0),
    "eps": hyper.number(1e-10),
    "maximize": hyper.flag(False),
    # In DeepSpeed's vocabulary, where it is read and has no meaning for Adagrad.
    "amsgrad": hyper.flag(False, per_group=False),
    "fused": hyper.optional_flag(),
}


class AdagradFactory(TableFactory):
    """Makes Adagrad."""

    hypers = _HYPERS
    name = "adagrad"
    granularity: Granularity = "element"

    def check(self, params: dict[str, Any]) -> dict[str, Any]:
        """See :class:`polyscale.interfaces.optimizer.OptimizerFactory`.

        Raises:
            ConfigError: a hyper-parameter is unknown or out of range.
            UnsupportedError: amsgrad is asked for.
        """
        full = super().check(params)
        if full["amsgrad"]:
            raise UnsupportedError(
                "optimizer.params.amsgrad=true",
                why="Adagrad's sum of squares never falls, so it has no amsgrad form",
                fix="Leave it out",
            )
        return full

    def build(
        self, groups: list[OptimizerGroup], params: dict[str, Any], store: ParameterStore | None = None
    ) -> torch.optim.Optimizer:
        """Make the optimizer over local tensors of any shape."""
        import torch

        full = self.check(params)
        del full["amsgrad"]
        made = torch_groups(groups, lambda group: self.check_group(group.options))
        return make(torch.optim.Adagrad, made, full)


class AdagradPlugin:
    """Adagrad."""

    interface_version = (1, 0)

    @hookimpl
    def polyscale_optimizer(self, context: PluginContext) -> AdagradFactory:
        """Hand over the factory of Adagrad."""
        return AdagradFactory()
