"""Adam and AdamW.

Notable: as in DeepSpeed, ``adam`` decouples weight decay (it is AdamW) unless ``adam_w_mode`` is false; ``torch_adam``
chose between implementations that are one here, and has no effect. Without ``bias_correction`` an own implementation
is used, since torch has none.

Kingma and Ba 2015, "Adam", Algorithm 1; Loshchilov and Hutter 2019, "Decoupled Weight Decay Regularization".
"""

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
    "lr": hyper.number(1e-3),
    "betas": hyper.betas((0.9, 0.999)),
    "eps": hyper.number(1e-8),
    "weight_decay": hyper.number(0.0),
    "amsgrad": hyper.flag(False),
    "maximize": hyper.flag(False),
    "bias_correction": hyper.flag(True, per_group=False),
    "adam_w_mode": hyper.flag(True, per_group=False),
    "torch_adam": hyper.flag(False, per_group=False),
    "fp32_optimizer_states": hyper.flag(True, per_group=False),
    "fused": hyper.optional_flag(),
}
_TORCH = ("lr", "betas", "eps", "weight_decay", "amsgrad", "maximize", "fused")


class AdamFactory(TableFactory):
    """Makes Adam or AdamW."""

    hypers = _HYPERS
    granularity: Granularity = "element"

    def __init__(self, name: str) -> None:
        """``name``: "adam" or "adamw"."""
        self.name = name

    def check(self, params: dict[str, Any]) -> dict[str, Any]:
        """See :class:`polyscale.interfaces.optimizer.OptimizerFactory`.

        Raises:
            ConfigError: a hyper-parameter is unknown or out of range.
            UnsupportedError: states narrower than fp32, or amsgrad without bias correction.
        """
        full = super().check(params)
        if not full["fp32_optimizer_states"]:
            raise UnsupportedError(
                "optimizer.params.fp32_optimizer_states=false",
                why=f"{self.name} keeps its states in the dtype of the masters",
                fix="Leave it out",
            )
        if full["amsgrad"] and not full["bias_correction"]:
            raise UnsupportedError(
                "optimizer.params.amsgrad=true with bias_correction=false",
                why="The maximum is defined over corrected moments",
                fix="Leave one of the two at its default",
            )
        return full

    def build(
        self, groups: list[OptimizerGroup], params: dict[str, Any], store: ParameterStore | None = None
    ) -> torch.optim.Optimizer:
        """Make the optimizer over local tensors of any shape."""
        import torch

        full = self.check(params)
        made = torch_groups(groups, lambda group: self.check_group(group.options))
        decoupled = self.name == "adamw" or full["adam_w_mode"]
        settings = {name: full[name] for name in _TORCH}
        if not full["bias_correction"]:
            from polyscale_standard.optimizers.uncorrected_adam import UncorrectedAdam

            del settings["fused"], settings["amsgrad"]
            return UncorrectedAdam(made, decoupled=decoupled, **settings)
        return make(torch.optim.AdamW if decoupled else torch.optim.Adam, made, settings)


class AdamPlugin:
    """Adam (AdamW unless ``adam_w_mode`` is false)."""

    interface_version = (1, 0)

    @hookimpl
    def polyscale_optimizer(self, context: PluginContext) -> AdamFactory:
        """Hand over the factory of Adam."""
        return AdamFactory("adam")


class AdamWPlugin:
    """AdamW."""

    interface_version = (1, 0)

    @hookimpl
    def polyscale_optimizer(self, context: PluginContext) -> AdamFactory:
        """Hand over the factory of AdamW."""
        return AdamFactory("adamw")
