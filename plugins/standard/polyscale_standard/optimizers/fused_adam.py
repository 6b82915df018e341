"""Adam and AdamW in one pass over memory, by the op ``fused_adam_``.

Notable: hyper-parameters are those of DeepSpeed's FusedAdam, which decouples weight decay (it is AdamW) unless
``adam_w_mode`` is false. Classes, states and their names are those of ``torch.optim``, so checkpoints of ``adam`` and
``adamw`` carry over and back. Where no kernel is built the op's reference runs, slower than torch's fused form.

Kingma and Ba 2015, "Adam", Algorithm 1; Loshchilov and Hutter 2019, "Decoupled Weight Decay Regularization",
Algorithm 2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from polyscale.errors import UnsupportedError
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
    "maximize": hyper.flag(False),
    "amsgrad": hyper.flag(False, per_group=False),
    "bias_correction": hyper.flag(True, per_group=False),
    "adam_w_mode": hyper.flag(True, per_group=False),
    "set_grad_none": hyper.flag(True, per_group=False),
}
_TO_THE_CLASS = ("lr", "betas", "eps", "weight_decay", "maximize")


class FusedAdamFactory(TableFactory):
    """Makes Adam or AdamW over the op ``fused_adam_``; ``set_grad_none`` has no effect, the engine drops gradients."""

    hypers = _HYPERS
    granularity: Granularity = "element"

    def __init__(self, name: str) -> None:
        """``name``: "fusedadam" or "fusedadamw"."""
        self.name = name

    def check(self, params: dict[str, Any]) -> dict[str, Any]:
        """See :class:`polyscale.interfaces.optimizer.OptimizerFactory`.

        Raises:
            ConfigError: a hyper-parameter is unknown or out of range.
            UnsupportedError: amsgrad.
        """
        full = super().check(params)
        if full["amsgrad"]:
            raise UnsupportedError(
                "optimizer.params.amsgrad=true",
                why=f"{self.name} keeps no maximum of the second moment",
                fix='Use "optimizer": {"type": "AdamW"}, which does',
            )
        return full

    def build(
        self, groups: list[OptimizerGroup], params: dict[str, Any], store: ParameterStore | None = None
    ) -> torch.optim.Optimizer:
        """Make the optimizer over local tensors of any shape."""
        from polyscale_standard.optimizers import fused_adam_step

        full = self.check(params)
        made = torch_groups(groups, lambda group: self.check_group(group.options))
        decoupled = self.name == "fusedadamw" or full["adam_w_mode"]
        settings = {name: full[name] for name in _TO_THE_CLASS}
        if not full["bias_correction"]:
            return fused_adam_step.UncorrectedAdam(made, decoupled=decoupled, **settings)
        return (fused_adam_step.AdamW if decoupled else fused_adam_step.Adam)(made, **settings)


class FusedAdamPlugin:
    """Adam in one pass over memory (AdamW unless ``adam_w_mode`` is false)."""

    interface_version = (1, 0)

    @hookimpl
    def polyscale_optimizer(self, context: PluginContext) -> FusedAdamFactory:
        """Hand over the factory of FusedAdam."""
        return FusedAdamFactory("fusedadam")


class FusedAdamWPlugin:
    """AdamW in one pass over memory."""

    interface_version = (1, 0)

    @hookimpl
    def polyscale_optimizer(self, context: PluginContext) -> FusedAdamFactory:
        """Hand over the factory of FusedAdamW."""
        return FusedAdamFactory("fusedadamw")
