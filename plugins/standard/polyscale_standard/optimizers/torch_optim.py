"""Any optimizer of ``torch.optim`` by the name of its class.

Notable: valid hyper-parameters are those of the class's own signature, and their ranges are checked by making it over
a throw-away parameter. Where it takes a number, text that spells one is taken (YAML reads ``1e-4`` as text). Classes
that cannot work on shards are refused, with what to use instead.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from polyscale.config.arguments import fitted_all, parameters_of
from polyscale.config.errors import raise_all
from polyscale.errors import ConfigError, nearest
from polyscale.hooks import PluginContext, hookimpl
from polyscale.interfaces.optimizer import Granularity, OptimizerGroup
from polyscale.optimizers import granularity_of
from polyscale_standard.optimizers.hyper import refuse_unknown
from polyscale_standard.optimizers.torch_groups import make, torch_groups

if TYPE_CHECKING:
    import torch

    from polyscale.parameters.store import ParameterStore


class TorchOptimFactory:
    """Makes an optimizer of the class that the option ``class`` names, in any case of letters."""

    def __init__(self, name: str, class_name: str | None) -> None:
        """``class_name``: None when only asked what is installed.

        Raises:
            ConfigError: torch has no such optimizer.
            UnsupportedError: it cannot work on sharded or flat parameters.
        """
        self.name = name
        self.granularity: Granularity = "tensor"
        self._class: type[torch.optim.Optimizer] | None = None
        if class_name is not None:
            self._class = find(class_name)
            self.granularity = granularity_of(self._class)

    def check(self, params: dict[str, Any]) -> dict[str, Any]:
        """See :class:`polyscale.interfaces.optimizer.OptimizerFactory`.

        Raises:
            ConfigError: a hyper-parameter is unknown or out of range, or no class was named.
        """
        import torch

        cls = self._chosen()
        defaults = {name: known.default for name, known in parameters_of(cls, "params").items()}
        fitting = self.check_group(params)
        try:
            cls([torch.nn.Parameter(torch.zeros(1, 1))], **fitting)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ConfigError(
                f"optimizer.params={params!r}",
                why=f"torch.optim.{cls.__name__} refuses it: {error}",
                fix=f"Its defaults are {defaults}",
            ) from error
        return defaults | fitting

    def check_group(self, options: dict[str, Any]) -> dict[str, Any]:
        """Return the hyper-parameters of one parameter group, only those given.

        Raises:
            ConfigError: one is unknown, or of a type that the class does not take.
        """
        name = f"torch.optim.{self._chosen().__name__}"
        known = parameters_of(self._chosen(), "params")
        errors = [refuse_unknown(name, key, known) for key in options if key not in known]
        fitting, wrong = fitted_all({key: value for key, value in options.items() if key in known}, known)
        errors += [
            ConfigError(
                f"optimizer.params.{key}={options[key]!r}",
                why=f"{name} expects {wanted}",
                fix=f"The default is {known[key].default!r}",
            )
            for key, wanted in wrong.items()
        ]
        raise_all(errors, f"the hyper-parameters of {name}")
        return fitting

    def build(
        self, groups: list[OptimizerGroup], params: dict[str, Any], store: ParameterStore | None = None
    ) -> torch.optim.Optimizer:
        """Make the optimizer; parameters are local tensors where every element is updated by itself."""
        cls = self._chosen()
        full = self.check(params)

        def options(group: OptimizerGroup) -> dict[str, Any]:
            own = self.check_group(group.options)
            self.check(full | own)
            return own

        made = torch_groups(groups, options)
        free = full.get("fused") is None and full.get("foreach") is None
        if self.granularity == "element" and free and "foreach" in full:
            del full["foreach"]
            return make(cls, made, full if "fused" in full else full | {"fused": False})
        return cls(made, **full)

    def _chosen(self) -> type[torch.optim.Optimizer]:
        if self._class is None:
            raise ConfigError(
                "Optimizer 'torch' without a class",
                why="It stands for any class of torch.optim",
                fix='Write the class as the type: "optimizer": {"type": "NAdam"}',
            )
        return self._class


def find(class_name: str) -> type[torch.optim.Optimizer]:
    """Return the class of ``torch.optim`` called ``class_name``, in any case of letters.

    Raises:
        ConfigError: there is none; the nearest name is given.
    """
    import torch

    classes = {
        name.lower(): member
        for name, member in vars(torch.optim).items()
        if isinstance(member, type)
        and issubclass(member, torch.optim.Optimizer)
        and member is not torch.optim.Optimizer
    }
    found = classes.get(class_name.lower())
    if found is None:
        names = sorted(member.__name__ for member in classes.values())
        close = nearest(class_name, names)
        raise ConfigError(
            f"Optimizer {class_name!r}",
            why="Neither a plugin nor torch.optim has one of that name",
            fix=(f"Did you mean {close!r}? " if close else "") + f"torch.optim has {', '.join(names)}",
        )
    return found


class TorchOptimPlugin:
    """Any of ``torch.optim`` by name."""

    interface_version = (1, 0)

    @hookimpl
    def polyscale_optimizer(self, context: PluginContext) -> TorchOptimFactory:
        """Hand over the factory for the class named by the option ``class``."""
        return TorchOptimFactory(context.name, context.options.get("class"))
