"""The model's state as named logical tensors, and this rank's random numbers: what a checkpoint holds.

Names in a checkpoint: ``parameter/<fqn>``, ``optimizer/<state>/<fqn>`` (``optimizer_state``), ``buffer/<name>``.
Everything else is in the manifest (hyper-parameters, scalar states, schedule, loss scaler, counters) or in one file per
rank (random numbers, tracked objects).
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from polyscale.engine.setup import Setup
from polyscale.interfaces.checkpoint import Box, LogicalTensor
from polyscale.parameters.names import public_name


def persistent_buffers(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield (name, module, attribute) of every buffer that belongs to ``state_dict``."""
    for name, module in model.named_modules():
        for key, buffer in module._buffers.items():
            if buffer is not None and key not in module._non_persistent_buffers_set:
                yield public_name(f"{name}.{key}" if name else key), module, key


def model_tensors(setup: Setup, names: Mapping[str, str] | None = None) -> dict[str, LogicalTensor]:
    """All parameters and persistent buffers by name.

    Args:
        setup: the engine's parts.
        names: the model's name of a parameter -> its name in the checkpoint; None: they are the same.
    """
    store = setup.applied.store
    found: dict[str, LogicalTensor] = {}
    for fqn, info in store.infos.items():
        local = store.local(fqn)
        assert local is not None
        key = f"parameter/{fqn if names is None else names[fqn]}"
        add_tensor(found, key, LogicalTensor(info.shape, local.dtype, store.fragments(fqn, local)))
    first = setup.topology.rank == 0
    for name, module, key in persistent_buffers(setup.model):
        buffer = module._buffers[key]
        assert buffer is not None
        shape = tuple(buffer.shape)
        found[f"buffer/{name}"] = LogicalTensor(shape, buffer.dtype, (Box((0,) * len(shape), buffer, first),))
    return found


def add_tensor(found: dict[str, LogicalTensor], key: str, tensor: LogicalTensor) -> None:
    """Put ``tensor`` under ``key``, beside one that is there: weights that a checkpoint ties may be apart here."""
    boxes = (*found[key].boxes, *tensor.boxes) if key in found else tensor.boxes
    found[key] = replace(tensor, boxes=boxes)


def kind_of(part: Any, state: Any) -> str:
    """Of which kind a scheduler or loss scaler is: the schedule that its state names, or its class."""
    schedule = state.get("schedule") if isinstance(state, dict) else None
    return schedule if isinstance(schedule, str) else type(part).__name__


def own_buffers(setup: Setup) -> dict[str, torch.Tensor]:
    """Buffers of a rank other than 0, whose own are among the tensors: running statistics differ between ranks."""
    if setup.topology.rank == 0:
        return {}
    return {name: module._buffers[key].cpu() for name, module, key in persistent_buffers(setup.model)}  # type: ignore[union-attr]


@torch.no_grad()
def restore_own_buffers(setup: Setup, saved: Mapping[str, torch.Tensor]) -> None:
    """Restore what ``own_buffers`` gave."""
    for name, module, key in persistent_buffers(setup.model):
        buffer = module._buffers[key]
        if name in saved and buffer is not None and buffer.shape == saved[name].shape:
            buffer.copy_(saved[name])


def random_state(setup: Setup) -> dict[str, Any]:
    """States of this rank's generators: torch's on host and device, Python's, NumPy's where it is in use."""
    state: dict[str, Any] = {
        "accelerator": setup.accelerator.name,
        "host": torch.get_rng_state(),
        "device": setup.accelerator.rng_state(),
        "python": random.getstate(),
    }
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kind, keys, *rest = numpy.random.get_state()
        state["numpy"] = [kind, torch.from_numpy(keys.astype("int64")), *rest]
    return state


def restore_random_state(setup: Setup, state: Mapping[str, Any]) -> str:
    """Restore what ``random_state`` gave; return why the device's generator was left as it was, or ""."""
    torch.set_rng_state(state["host"])
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy" in state:
        kind, keys, *rest = state["numpy"]
        numpy.random.set_state((kind, keys.numpy().astype("uint32"), *rest))
    here = setup.accelerator.name
    there = state.get("accelerator", here)
    if there != here:
        return f"saved on {there}, here is {here}"
    setup.accelerator.set_rng_state(state["device"])
    return ""
