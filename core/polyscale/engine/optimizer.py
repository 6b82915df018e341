"""Where the optimizer comes from: the configuration, a callable, or an instance without state.

Notable: sharding replaces parameters, so an optimizer made before would silently train nothing. An instance is kept
and its groups are pointed at what the engine trains; it must be over this model's parameters and have no state yet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from polyscale.discovery import installed, load
from polyscale.errors import ConfigError, PolyscaleError, UnsupportedError
from polyscale.hooks import PluginContext
from polyscale.interfaces.accelerator import Accelerator
from polyscale.interfaces.optimizer import Granularity, OptimizerFactory, OptimizerGroup
from polyscale.interfaces.parallelism import DataParallelApplied
from polyscale.optimizers import WAYS_OUT, granularity_of, refuse_flat, split_groups
from polyscale.parameters.names import public_name
from polyscale.parameters.store import ParameterStore

if TYPE_CHECKING:
    from polyscale.config import Config

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
    if any(_has_stepped(state) for state in optimizer.state.values()):
        raise PolyscaleError(
            f"An optimizer ({type(optimizer).__name__}) that has taken steps",
            why="its state belongs to whole parameters, which the engine replaces",
            fix="Pass a fresh optimizer; restore its state with engine.load",
        )
    _refuse_strangers(optimizer, names)


def _refuse_strangers(optimizer: torch.optim.Optimizer, names: dict[nn.Parameter, str]) -> None:
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
        handed = {_whole(store, fqn): fqn for fqn, info in store.infos.items() if _trainable(info)}
        made = given(list(handed))
        if not isinstance(made, torch.optim.Optimizer):
            raise PolyscaleError(
                f"The optimizer callable returned {type(made).__name__}",
                why="a torch.optim.Optimizer was expected",
                fix="Return the optimizer it made",
            )
        # It may also have taken the parameters from the model before, or from the module now.
        by_tensor = {store.optimizer_parameter(fqn, "tensor"): fqn for fqn in store.infos}
        by_module = {
            parameter: store.canonical(public_name(name))
            for part in applied.parts
            for name, parameter in part.module.named_parameters(part.prefix)
        }
        known = {**names, **by_module, **by_tensor, **handed}
        _refuse_strangers(made, known)
        return _repoint(made, known, applied)
    return _repoint(given, names, applied)


def _whole(store: ParameterStore, fqn: str) -> nn.Parameter:
    """What a callable gets for a parameter: the store's own, or a stand-in of the whole shape where that is a fragment.

    Callables look at shapes ("no weight decay for what has one dimension"), and the class that they make is not known
    before. A stand-in takes the memory of one element, and what the engine trains takes its place afterwards.
    """
    info, own = store.infos[fqn], store.optimizer_parameter(fqn, "tensor")
    if tuple(own.shape) == info.shape:
        return own
    one = torch.zeros((), dtype=own.dtype, device=own.device)
    return nn.Parameter(one.expand(info.shape), requires_grad=own.requires_grad)


def _repoint(
    optimizer: torch.optim.Optimizer, names: dict[nn.Parameter, str], applied: DataParallelApplied
) -> torch.optim.Optimizer:
    granularity = granularity_of(optimizer)
    store = applied.store
    if store.flat:
        refuse_flat(optimizer, granularity)
    fresh = {names[p]: (p, state) for p, state in optimizer.state.items() if isinstance(p, nn.Parameter)}
    optimizer.state.clear()
    for group in optimizer.param_groups:
        kept = [
            (index, names[parameter])
            for index, parameter in enumerate(group["params"])
            if 0 not in store.infos[names[parameter]].shape
        ]
        group["params"] = [store.optimizer_parameter(fqn, granularity) for _, fqn in kept]
        if group.get("param_names"):
            group["param_names"] = [group["param_names"][index] for index, _ in kept]
        for _, fqn in kept:
            if fqn in fresh:
                optimizer.state[store.optimizer_parameter(fqn, granularity)] = _moved(
                    *fresh[fqn], store.optimizer_parameter(fqn, granularity)
                )
    store.attach(optimizer, granularity)
    return optimizer


def _has_stepped(state: dict[str, Any]) -> bool:
    """Whether a parameter's state is more than what a constructor fills in (Adagrad's does)."""
    return bool(state) and not ("step" in state and float(state["step"]) == 0)


def _moved(old: nn.Parameter, state: dict[str, Any], new: nn.Parameter) -> dict[str, Any]:
    """Return a constructor's state (constants, counters) for the parameter that stands in for ``old``."""
    moved: dict[str, Any] = {}
    for name, value in state.items():
        if isinstance(value, torch.Tensor) and value.shape == old.shape and value.numel() and value.dim():
            moved[name] = torch.full_like(new, value.reshape(-1)[0].item(), requires_grad=False)
        else:
            moved[name] = value.clone() if isinstance(value, torch.Tensor) else value
    return moved


def take_step(optimizer: torch.optim.Optimizer, granularity: Granularity) -> None:
    """Run ``optimizer.step()``.

    Raises:
        UnsupportedError: it was given DTensors, because it needs whole tensors or is unknown, and cannot update them.
    """
    try:
        optimizer.step()
    except (RuntimeError, NotImplementedError) as error:
        text = str(error).strip().split("\n", 1)[0]
        if granularity != "tensor" or not ("sharding" in str(error).lower() or "DTensor" in str(error)):
            raise
        raise UnsupportedError(
            f"Optimizer {type(optimizer).__name__} over sharded parameters",
            why=f"this torch cannot run it on DTensors ({text})",
            fix=WAYS_OUT,
        ) from error


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
    if store.flat:
        refuse_flat(factory, granularity, name=section.type)
    groups = [
        OptimizerGroup(members, dict(options))
        for fqns, options in split_groups(section, store.infos, norms=norms)
        if (members := _members(store, fqns, granularity))
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


def _members(store: ParameterStore, fqns: list[str], granularity: Granularity) -> dict[str, nn.Parameter]:
    return {fqn: store.optimizer_parameter(fqn, granularity) for fqn in fqns if _trainable(store.infos[fqn])}


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
