"""The optimizer's state in a checkpoint: states shaped like their parameter are tensors, the rest are plain values.

Notable: everything goes by parameter name, never by position. A load maps the model's names to those of the checkpoint,
which may be another name of the same tied weight. How an optimizer computes (``fused``, ``foreach``, ...) belongs to
the machine, so that of this engine stays.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import ExitStack
from typing import Any

import torch

from polyscale.engine.setup import Setup
from polyscale.engine.state import add_tensor
from polyscale.errors import CheckpointError
from polyscale.interfaces.checkpoint import LogicalTensor
from polyscale.parameters.inspect import as_dtensor
from polyscale.parameters.sharded_store import local_tensor

_NO_OPTIONS = frozenset({"params", "param_names"})
_OF_THE_MACHINE = frozenset({"fused", "foreach", "capturable", "differentiable"})


def names_of(setup: Setup) -> dict[int, str]:
    """Map the id of each parameter of the optimizer to the parameter's name.

    Raises:
        CheckpointError: the optimizer was given a parameter that is not of the model.
    """
    optimizer, store = setup.optimizer, setup.applied.store
    assert optimizer is not None
    names = {id(store.optimizer_parameter(fqn, store.granularity)): fqn for fqn in store.infos}
    strangers = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in names]
    if strangers:
        raise CheckpointError(
            f"The optimizer has a parameter of shape {tuple(strangers[0].shape)}",
            why="it is none of the model's, so it has no name under which its state could be kept",
            fix="Make it a parameter of the model before polyscale.initialize",
        )
    return names


def optimizer_tensors(setup: Setup, names: Mapping[str, str] | None = None) -> dict[str, LogicalTensor]:
    """All optimizer states that are shaped like their parameter.

    Args:
        setup: the engine's parts.
        names: the model's name of a parameter -> its name in the checkpoint, of the parameters that are wanted; None:
            all, under the model's names.
    """
    optimizer, store = setup.optimizer, setup.applied.store
    found: dict[str, LogicalTensor] = {}
    if optimizer is None:
        return found
    for fqn, stored in ({fqn: fqn for fqn in store.infos} if names is None else names).items():
        parameter = store.optimizer_parameter(fqn, store.granularity)
        for name, value in optimizer.state.get(parameter, {}).items():
            if is_sharded_like(name, value, parameter):
                local = local_tensor(value)
                whole = LogicalTensor(store.infos[fqn].shape, local.dtype, store.fragments(fqn, local))
                add_tensor(found, f"optimizer/{name}/{stored}", whole)
    return found


def is_sharded_like(name: str, value: Any, parameter: torch.Tensor) -> bool:
    """Whether the optimizer state ``name`` is element by element beside its parameter.

    Beside a parameter without dimensions a counter looks the same, and must not depend on whether this rank holds such
    a parameter as 0-dim or as a fragment; torch calls it ``step``.
    """
    if not isinstance(value, torch.Tensor) or value.shape != parameter.shape:
        return False
    return value.dim() > 0 or (
        name != "step" and value.dtype.is_floating_point and parameter.dim() == 0 and value.device == parameter.device
    )


def optimizer_values(setup: Setup) -> dict[str, Any] | None:
    """Class, groups by parameter name, hyper-parameters, and the states that are one number each.

    Raises:
        CheckpointError: a state is neither one number nor shaped like its parameter.
    """
    optimizer = setup.optimizer
    if optimizer is None:
        return None
    names = names_of(setup)
    groups = [
        {
            "names": [names[id(parameter)] for parameter in group["params"]],
            "options": {key: value for key, value in group.items() if key not in _NO_OPTIONS},
        }
        for group in optimizer.param_groups
    ]
    states = {
        names[id(parameter)]: _describe(state, parameter)
        for parameter, state in optimizer.state.items()
        if id(parameter) in names
    }
    return {"class": type(optimizer).__name__, "groups": groups, "states": states}


def prepare_optimizer(
    setup: Setup, saved: Mapping[str, Any], names: Mapping[str, str], undo: ExitStack, *, keep: Collection[str] = ()
) -> None:
    """Give the optimizer the hyper-parameters and scalar states of ``saved``, and memory for the others.

    A parameter of which the checkpoint's optimizer had no state has none afterwards; one that it did not train keeps
    what it has.

    Args:
        setup: the engine's parts.
        saved: what ``optimizer_values`` gave.
        names: the model's name of a parameter -> its name in the checkpoint.
        undo: gets what puts the optimizer back as it was.
        keep: hyper-parameters to leave as they are.
    """
    optimizer = setup.optimizer
    assert optimizer is not None
    _remember(optimizer, undo)
    stored = {key: names[fqn] for key, fqn in names_of(setup).items()}
    by_names = {frozenset(group["names"]): group["options"] for group in saved["groups"]}
    trained = {name for group in saved["groups"] for name in group["names"]}
    for group in optimizer.param_groups:
        own = [stored[id(parameter)] for parameter in group["params"]]
        for key, value in by_names.get(frozenset(own), {}).items():
            if key not in _NO_OPTIONS | _OF_THE_MACHINE and key not in keep:
                group[key] = _like(group.get(key), value)
        for name, parameter in zip(own, group["params"], strict=True):
            if name in saved["states"]:
                optimizer.state[parameter] = _fresh_state(saved["states"][name], parameter, group)
            elif name in trained:
                optimizer.state.pop(parameter, None)


def unmatched(setup: Setup, saved: Mapping[str, Any], names: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """What of this optimizer the checkpoint lacks, and what of the checkpoint's it has no use for, in words."""
    assert setup.optimizer is not None
    fqns = names_of(setup)
    groups = [[fqns[id(parameter)] for parameter in group["params"]] for group in setup.optimizer.param_groups]
    known = {frozenset(group["names"]) for group in saved["groups"]}
    trained = {name for group in saved["groups"] for name in group["names"]}
    absent = [
        f"optimizer group {index}"
        for index, group in enumerate(groups)
        if frozenset(names[fqn] for fqn in group) not in known
    ]
    if saved["states"]:
        absent += [f"optimizer state of {fqn}" for group in groups for fqn in group if names[fqn] not in trained]
    own = {names[fqn] for group in groups for fqn in group}
    return absent, [f"optimizer state of {name}" for name in saved["states"] if name not in own]


def _remember(optimizer: torch.optim.Optimizer, undo: ExitStack) -> None:
    groups = [dict(group) for group in optimizer.param_groups]
    states = dict(optimizer.state)

    def put_back() -> None:
        for group, before in zip(optimizer.param_groups, groups, strict=True):
            group.clear()
            group.update(before)
        optimizer.state.clear()
        optimizer.state.update(states)

    undo.callback(put_back)


def _like(own: Any, value: Any) -> Any:
    """A saved hyper-parameter as this engine holds it: one that is a tensor stays one."""
    return torch.full_like(own, value) if isinstance(own, torch.Tensor) else value


def _fresh_state(entry: Mapping[str, Any], parameter: torch.Tensor, group: Mapping[str, Any]) -> dict[str, Any]:
    state: dict[str, Any] = {}
    on_device = bool(group.get("fused") or group.get("capturable"))
    for name, value in entry["scalars"].items():
        if isinstance(value, dict) and "tensor" in value:
            device = parameter.device if on_device else torch.device("cpu")
            value = torch.tensor(value["tensor"], dtype=_dtype(value["dtype"]), device=device)
        state[name] = value
    local = local_tensor(parameter.detach())
    for name, dtype in entry["tensors"].items():
        state[name] = as_dtensor(torch.zeros_like(local, dtype=_dtype(dtype)), parameter)
    return state


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, str(name), None)
    if not isinstance(found, torch.dtype):
        raise CheckpointError(
            f"An optimizer state of dtype {name!r}",
            why="torch has none of that name",
            fix="The manifest was changed or damaged: load another checkpoint",
        )
    return found


def _describe(state: Mapping[str, Any], parameter: torch.Tensor) -> dict[str, Any]:
    like = {name: value for name, value in state.items() if is_sharded_like(name, value, parameter)}
    return {
        "tensors": {name: str(value.dtype).removeprefix("torch.") for name, value in like.items()},
        "scalars": {name: _scalar(value) for name, value in state.items() if name not in like},
    }


def _scalar(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        if value.numel() != 1:
            raise CheckpointError(
                f"An optimizer state of shape {tuple(value.shape)}",
                why="it is neither one number nor shaped like its parameter, so it cannot be resharded",
                fix="Use another optimizer, or keep that state with engine.track",
            )
        return {"tensor": value.item(), "dtype": str(value.dtype).removeprefix("torch.")}
    return value
