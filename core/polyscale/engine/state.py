"""The engine's state as named logical tensors and plain values: what a checkpoint holds, read and written alike.

Names in a checkpoint: ``parameter/<fqn>``, ``optimizer/<state>/<fqn>``, ``buffer/<name>``. Everything else is in the
manifest (hyper-parameters, scalar states, schedule, loss scaler, counters) or in one file per rank (random numbers,
tracked objects).
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from polyscale.engine.setup import Setup
from polyscale.errors import CheckpointError
from polyscale.interfaces.checkpoint import Box, LogicalTensor
from polyscale.parameters.inspect import as_dtensor
from polyscale.parameters.sharded_store import local_tensor
from polyscale.parameters.store import ParameterStore


def persistent_buffers(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield (name, module, attribute) of every buffer that belongs to ``state_dict``."""
    for name, module in model.named_modules():
        for key, buffer in module._buffers.items():
            if buffer is not None and key not in module._non_persistent_buffers_set:
                yield (f"{name}.{key}" if name else key), module, key


def model_tensors(setup: Setup) -> dict[str, LogicalTensor]:
    """All parameters and persistent buffers by name."""
    store = setup.applied.store
    found: dict[str, LogicalTensor] = {}
    for fqn, info in store.infos.items():
        local = store.local(fqn)
        assert local is not None
        found[f"parameter/{fqn}"] = LogicalTensor(info.shape, local.dtype, store.fragments(fqn, local))
    first = setup.topology.rank == 0
    for name, module, key in persistent_buffers(setup.model):
        buffer = module._buffers[key]
        assert buffer is not None
        shape = tuple(buffer.shape)
        found[f"buffer/{name}"] = LogicalTensor(shape, buffer.dtype, (Box((0,) * len(shape), buffer, first),))
    return found


def names_of(store: ParameterStore) -> dict[int, str]:
    """Map the id of what the optimizer updates to the parameter's name."""
    return {id(store.optimizer_parameter(fqn, store.granularity)): fqn for fqn in store.infos}


def optimizer_tensors(setup: Setup) -> dict[str, LogicalTensor]:
    """All optimizer states that are shaped like their parameter."""
    optimizer, store = setup.optimizer, setup.applied.store
    found: dict[str, LogicalTensor] = {}
    if optimizer is None:
        return found
    for fqn, info in store.infos.items():
        parameter = store.optimizer_parameter(fqn, store.granularity)
        for name, value in optimizer.state.get(parameter, {}).items():
            if is_sharded_like(value, parameter):
                local = local_tensor(value)
                found[f"optimizer/{name}/{fqn}"] = LogicalTensor(info.shape, local.dtype, store.fragments(fqn, local))
    return found


def is_sharded_like(value: Any, parameter: torch.Tensor) -> bool:
    """Whether an optimizer state is element by element beside its parameter."""
    if not isinstance(value, torch.Tensor) or value.shape != parameter.shape:
        return False
    return value.dim() > 0 or (
        value.dtype.is_floating_point and parameter.dim() == 0 and value.device == parameter.device
    )


def optimizer_values(setup: Setup) -> dict[str, Any] | None:
    """Class, groups by parameter name, hyper-parameters, and the states that are one number each."""
    optimizer, store = setup.optimizer, setup.applied.store
    if optimizer is None:
        return None
    names = names_of(store)
    groups = [
        {
            "names": [names[id(parameter)] for parameter in group["params"]],
            "options": {key: value for key, value in group.items() if key not in ("params", "param_names")},
        }
        for group in optimizer.param_groups
    ]
    states: dict[str, Any] = {}
    for parameter, state in optimizer.state.items():
        fqn = names[id(parameter)]
        states[fqn] = {
            "tensors": {
                name: str(value.dtype).removeprefix("torch.")
                for name, value in state.items()
                if is_sharded_like(value, parameter)
            },
            "scalars": {name: _scalar(value) for name, value in state.items() if not is_sharded_like(value, parameter)},
        }
    return {"class": type(optimizer).__name__, "groups": groups, "states": states}


def prepare_optimizer(setup: Setup, saved: dict[str, Any]) -> Callable[[], None]:
    """Give the optimizer the hyper-parameters and scalar states of ``saved``, and memory for the others.

    Returns:
        What puts the optimizer back as it was.
    """
    optimizer, store = setup.optimizer, setup.applied.store
    assert optimizer is not None
    names = names_of(store)
    options_before = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    by_names = {frozenset(group["names"]): group["options"] for group in saved["groups"]}
    for group in optimizer.param_groups:
        options = by_names.get(frozenset(names[id(parameter)] for parameter in group["params"]))
        if options is not None:
            group.update(options)
    before = dict(optimizer.state)
    optimizer.state.clear()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            entry = saved["states"].get(names[id(parameter)])
            if entry is not None:
                optimizer.state[parameter] = _fresh_state(entry, parameter, group)

    def undo() -> None:
        for group, old in zip(optimizer.param_groups, options_before, strict=True):
            group.update(old)
        optimizer.state.clear()
        optimizer.state.update(before)

    return undo


def unmatched_groups(setup: Setup, saved: dict[str, Any]) -> list[str]:
    """Say which groups of this optimizer hold other parameters than any saved one."""
    assert setup.optimizer is not None
    names = names_of(setup.applied.store)
    known = [frozenset(group["names"]) for group in saved["groups"]]
    return [
        f"optimizer group {index}"
        for index, group in enumerate(setup.optimizer.param_groups)
        if frozenset(names[id(parameter)] for parameter in group["params"]) not in known
    ]


def _fresh_state(entry: dict[str, Any], parameter: torch.Tensor, group: dict[str, Any]) -> dict[str, Any]:
    state: dict[str, Any] = {}
    on_device = bool(group.get("fused") or group.get("capturable"))
    for name, value in entry["scalars"].items():
        if isinstance(value, dict) and "tensor" in value:
            device = parameter.device if on_device else torch.device("cpu")
            value = torch.tensor(value["tensor"], dtype=getattr(torch, value["dtype"]), device=device)
        state[name] = value
    local = local_tensor(parameter.detach())
    for name, dtype in entry["tensors"].items():
        state[name] = as_dtensor(torch.zeros_like(local, dtype=getattr(torch, dtype)), parameter)
    return state


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


def own_buffers(setup: Setup) -> dict[str, torch.Tensor]:
    """Buffers of a rank other than 0, whose own are among the tensors: running statistics differ between ranks."""
    if setup.topology.rank == 0:
        return {}
    return {name: module._buffers[key].cpu() for name, module, key in persistent_buffers(setup.model)}  # type: ignore[union-attr]


@torch.no_grad()
def restore_own_buffers(setup: Setup, saved: dict[str, torch.Tensor]) -> None:
    """Restore what ``own_buffers`` gave."""
    for name, module, key in persistent_buffers(setup.model):
        buffer = module._buffers[key]
        if name in saved and buffer is not None and buffer.shape == saved[name].shape:
            buffer.copy_(saved[name])


def random_state(setup: Setup) -> dict[str, Any]:
    """States of this rank's generators: torch's on host and device, Python's, NumPy's where it is in use."""
    state: dict[str, Any] = {
        "host": torch.get_rng_state(),
        "device": setup.accelerator.rng_state(),
        "python": random.getstate(),
    }
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kind, keys, *rest = numpy.random.get_state()
        state["numpy"] = [kind, torch.from_numpy(keys.astype("int64")), *rest]
    return state


def restore_random_state(setup: Setup, state: dict[str, Any]) -> None:
    """Restore what ``random_state`` gave."""
    torch.set_rng_state(state["host"])
    setup.accelerator.set_rng_state(state["device"])
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy" in state:
        kind, keys, *rest = state["numpy"]
        numpy.random.set_state((kind, keys.numpy().astype("uint32"), *rest))
