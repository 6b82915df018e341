"""LAMB: Adam's direction, scaled for each tensor by the norm of the tensor over the norm of its update.

Notable: hyper-parameters are those of DeepSpeed's FusedLamb. What differs from it: moments are corrected before the
ratio is taken, as in the paper (FusedLamb corrects the learning rate afterwards, so its weight decay weighs more in the
first updates). ``min_coeff`` and ``max_coeff`` bound the ratio; both 1 in a group make it AdamW. ``max_grad_norm`` may
be 0, its default there: clipping is the engine's, over all parameters.

You et al. 2020, "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes", Algorithm 2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from polyscale.errors import ConfigError, UnsupportedError
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
    "eps": hyper.number(1e-8),
    "weight_decay": hyper.number(0.0),
    "bias_correction": hyper.flag(True),
    "eps_inside_sqrt": hyper.flag(False),
    "min_coeff": hyper.number(0.01),
    "max_coeff": hyper.number(10.0),
    "max_grad_norm": hyper.number(0.0, per_group=False),
    "amsgrad": hyper.flag(False, per_group=False),
}
_NOT_OF_THE_CLASS = ("max_grad_norm", "amsgrad")


class LambFactory(TableFactory):
    """Makes LAMB."""

    hypers = _HYPERS
    name = "lamb"
    granularity: Granularity = "norm"

    def check(self, params: dict[str, Any]) -> dict[str, Any]:
        """See :class:`polyscale.interfaces.optimizer.OptimizerFactory`.

        Raises:
            ConfigError: a hyper-parameter is unknown or out of range, or the bounds of the ratio are crossed.
            UnsupportedError: amsgrad, or a ``max_grad_norm`` other than 0.
        """
        full = super().check(params)
        if full["amsgrad"]:
            raise UnsupportedError(
                "optimizer.params.amsgrad=true",
                why="LAMB keeps no maximum of the second moment",
                fix="Leave it out",
            )
        if full["max_grad_norm"]:
            raise UnsupportedError(
                f"optimizer.params.max_grad_norm={full['max_grad_norm']:g}",
                why="Clipping is done by the engine, over all parameters",
                fix=f"Write gradient_clipping: {full['max_grad_norm']:g} at the top level",
            )
        return _ordered(full)

    def build(
        self, groups: list[OptimizerGroup], params: dict[str, Any], store: ParameterStore
    ) -> torch.optim.Optimizer:
        """Make the optimizer over local tensors of any shape; their norms come through ``store``."""
        from polyscale_standard.optimizers.lamb_step import Lamb

        full = self.check(params)

        def options(group: OptimizerGroup) -> dict[str, Any]:
            own = self.check_group(group.options)
            _ordered(full | own)
            return own

        settings = {name: value for name, value in full.items() if name not in _NOT_OF_THE_CLASS}
        return Lamb(torch_groups(groups, options), store, **settings)


def _ordered(full: dict[str, Any]) -> dict[str, Any]:
    if full["min_coeff"] > full["max_coeff"]:
        raise ConfigError(
            f"optimizer.params.min_coeff={full['min_coeff']:g} with max_coeff={full['max_coeff']:g}",
            why="The ratio is held between the two",
            fix="Give a min_coeff of at most max_coeff",
        )
    return full


class LambPlugin:
    """LAMB."""

    interface_version = (1, 0)

    @hookimpl
    def polyscale_optimizer(self, context: PluginContext) -> LambFactory:
        """Hand over the factory of LAMB."""
        return LambFactory()
