"""Where the optimizer comes from: the configuration, a callable, or an instance without state.

Notable: sharding replaces parameters, so an optimizer made before would silently train nothing. An instance is kept
and its groups are pointed at what the engine trains; it must be over this model's parameters and have no state yet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from polyscale.config import Config
from polyscale.discovery import installed, load
from polyscale.errors import ConfigError, PolyscaleError
from polyscale.hooks import PluginContext
from polyscale.interfaces.accelerator import Accelerator
from polyscale.interfaces.optimizer import Granularity, OptimizerFactory, OptimizerGroup
from polyscale.interfaces.parallelism import DataParallelApplied
from polyscale.optimizers import granularity_of, split_groups

OptimizerLike = torch.optim.Optimizer | Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def check_instance(optimizer: Any, names: dict[nn.Parameter, str]) -> None:
    """Check an optimizer instance before anything is allocated.

    Raises:
        PolyscaleError: it has state, or holds parameters that are not the model's.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        if callable(optimizer):
            return
        raise PolyscaleError(
            f"optimizer = {optimizer!r}",
            why="it is neither a torch.optim.Optimizer nor a callable that makes one",
            fix="Pass torch.optim.AdamW(model.parameters()), or a function of the parameters, or use config.optimizer",
        )
    granularity_of(optimizer)
    if any(optimizer.state.values()):
        raise PolyscaleError(
            f"An optimizer ({type(optimizer).__name__}) that has taken steps",
            why="its state belongs to whole parameters, which the engine replaces",
            fix="Pass a fresh optimizer; restore its state with engine.load",
        )
    strangers = [p for group in optimizer.param_groups for p in group["params"] if p not in names]
    if strangers:
        raise PolyscaleError(
            f"The optimizer holds {len(strangers)} parameters that are not the model's "
            f"(the first has shape {tuple(strangers[0].shape)})",
            why="the engine would train something else than the model",
            fix="Make it over the parameters of the model that you pass to polyscale.initialize",
        )


def build_optimizer(
    given: OptimizerLike | None,
    config: Config,
    applied: DataParallelApplied,
    names: dict[nn.Parameter, str],
    accelerator: Accelerator,
    norms: set[str],
) -> torch.optim.Optimizer | None:
    """Return the optimizer over what the engine trains, attached to the store; None when there is none."""
    store = applied.store
    if given is None:
        return _from_config(config, applied, accelerator, norms)
    if not isinstance(given, torch.optim.Optimizer):
        trained = [store.optimizer_parameter(fqn, "tensor") for fqn, info in store.infos.items() if _trainable(info)]
        made = given(trained)
        if not isinstance(made, torch.optim.Optimizer):
            raise PolyscaleError(
                f"The optimizer callable returned {type(made).__name__}",
                why="a torch.optim.Optimizer was expected",
                fix="Return the optimizer it made",
            )
        by_tensor = {store.optimizer_parameter(fqn, "tensor"): fqn for fqn in store.infos}
        return _repoint(made, by_tensor, applied)
    return _repoint(given, names, applied)


def _repoint(
    optimizer: torch.optim.Optimizer, names: dict[nn.Parameter, str], applied: DataParallelApplied
) -> torch.optim.Optimizer:
    granularity = granularity_of(optimizer)
    store = applied.store
    for group in optimizer.param_groups:
        fqns = [names[parameter] for parameter in group["params"]]
        group["params"] = [
            store.optimizer_parameter(fqn, granularity) for fqn in fqns if 0 not in store.infos[fqn].shape
        ]
    optimizer.state.clear()
    store.attach(optimizer, granularity)
    return optimizer


def _from_config(
    config: Config, applied: DataParallelApplied, accelerator: Accelerator, norms: set[str]
) -> torch.optim.Optimizer | None:
    section = config.optimizer
    if section is None:
        return None
    factory = load_factory(config, accelerator)
    params = factory.check(dict(section.params))
    granularity: Granularity = factory.granularity
    store = applied.store
    infos = {fqn: info for fqn, info in store.infos.items() if _trainable(info)}
    groups = [
        OptimizerGroup({fqn: store.optimizer_parameter(fqn, granularity) for fqn in fqns}, dict(options))
        for fqns, options in split_groups(section, infos, norms=norms)
        if fqns
    ]
    if not groups:
        raise ConfigError(
            f"optimizer.type = {section.type!r}",
            why="the model has no parameter to train (all are frozen or empty)",
            fix="Set requires_grad on a parameter, or leave the optimizer out",
        )
    optimizer = factory.build(groups, params, store)
    store.attach(optimizer, granularity)
    return optimizer


def load_factory(config: Config, accelerator: Accelerator | None) -> OptimizerFactory:
    """Load the factory that ``optimizer.type`` names: a plugin, else a class of ``torch.optim``."""
    section = config.optimizer
    assert section is not None
    wanted = section.type.lower()
    options = dict(config.backends.options.get(wanted, {}))
    if wanted not in {entry.name for entry in installed("optimizer")} and _torch_class(section.type):
        wanted, options = "torch", {"class": _torch_class(section.type)}
    context = PluginContext(name=wanted, options=options, config=config, accelerator=accelerator)
    factory: OptimizerFactory = load("optimizer", wanted, context)
    return factory


def _torch_class(name: str) -> str | None:
    by_lower = {
        key.lower(): key
        for key, value in vars(torch.optim).items()
        if isinstance(value, type) and issubclass(value, torch.optim.Optimizer) and value is not torch.optim.Optimizer
    }
    return by_lower.get(name.lower())


def _trainable(info: Any) -> bool:
    return info.requires_grad and 0 not in info.shape
