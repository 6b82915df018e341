"""SGD with momentum, over ``torch.optim.SGD``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from polyscale.errors import ConfigError
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
    "momentum": hyper.number(0.0),
    "dampening": hyper.number(0.0),
    "weight_decay": hyper.number(0.0),
    "nesterov": hyper.flag(False),
    "maximize": hyper.flag(False),
    "fused": hyper.optional_flag(),
}


class SgdFactory(TableFactory):
    """Makes SGD."""

    hypers = _HYPERS
    name = "sgd"
    granularity: Granularity = "element"

    def check(self, params: dict[str, Any]) -> dict[str, Any]:
        """See :class:`polyscale.interfaces.optimizer.OptimizerFactory`.

        Raises:
            ConfigError: a hyper-parameter is unknown or out of range, or Nesterov lacks momentum.
        """
        return _consistent(super().check(params))

    def build(
        self, groups: list[OptimizerGroup], params: dict[str, Any], store: ParameterStore | None = None
    ) -> torch.optim.Optimizer:
        """Make the optimizer over local tensors of any shape."""
        import torch

        full = self.check(params)

        def options(group: OptimizerGroup) -> dict[str, Any]:
            own = self.check_group(group.options)
            _consistent(full | own)
            return own

        optimizer = make(torch.optim.SGD, torch_groups(groups, options), full)
        optimizer.register_step_pre_hook(_start_late_momenta)
        return optimizer


def _start_late_momenta(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Give a momentum to parameters whose first gradient comes later than that of others.

    torch's fused SGD wants the momenta of all parameters or of none. The value is the one from which the first update
    comes out as a first update: momentum * buffer + (1 - dampening) * gradient = gradient.
    """
    import torch

    for group in optimizer.param_groups:
        live = [param for param in group["params"] if param.grad is not None]
        late = [param for param in live if "momentum_buffer" not in optimizer.state[param]]
        if not group["fused"] or not group["momentum"] or len(late) == len(live):
            continue
        for param in late:
            buffer = torch.zeros_like(param)
            if group["dampening"]:
                sign = -1.0 if group["maximize"] else 1.0
                gradient = sign * param.grad + group["weight_decay"] * param.detach()
                buffer = gradient * (group["dampening"] / group["momentum"])
            optimizer.state[param]["momentum_buffer"] = buffer


def _consistent(full: dict[str, Any]) -> dict[str, Any]:
    if full["nesterov"] and (full["momentum"] == 0 or full["dampening"] != 0):
        raise ConfigError(
            f"nesterov with momentum={full['momentum']:g} and dampening={full['dampening']:g}",
            why="Nesterov momentum looks ahead along undamped momentum",
            fix="Give momentum above 0 and dampening 0",
        )
    return full


class SgdPlugin:
    """SGD."""

    interface_version = (1, 0)

    @hookimpl
    def polyscale_optimizer(self, context: PluginContext) -> SgdFactory:
        """Hand over the factory of SGD."""
        return SgdFactory()
