"""Writes weights and persistent buffers as safetensors, keyed as the model's ``state_dict()``."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from polyscale.checkpoint.export import export_safetensors
from polyscale.engine.setup import Setup
from polyscale.engine.together import together

if TYPE_CHECKING:
    from polyscale.engine.engine import Engine


def export(engine: Engine, setup: Setup, path: str | os.PathLike[str], *, max_shard_bytes: int) -> list[str]:
    """See ``Engine.export``. Rank 0 writes; every rank takes part in assembling each tensor."""
    store = setup.applied.store
    parameters = {name: info for info in store.infos.values() for name in info.names}
    buffers: dict[str, torch.Tensor] = {}
    order: list[str] = []
    for prefix, module in setup.model.named_modules(remove_duplicate=False):
        for key in module._parameters:
            name = f"{prefix}.{key}" if prefix else key
            if name in parameters:
                order.append(name)
        for key, buffer in module._buffers.items():
            if buffer is not None and key not in module._non_persistent_buffers_set:
                buffers[f"{prefix}.{key}" if prefix else key] = buffer
                order.append(f"{prefix}.{key}" if prefix else key)
    plan = [
        (name, parameters[name].shape, parameters[name].dtype)
        if name in parameters
        else (name, tuple(buffers[name].shape), buffers[name].dtype)
        for name in order
    ]

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for name in order:
            full = store.get_full(name) if name in parameters else buffers[name]
            assert full is not None
            yield name, full.detach().to("cpu")
            del full  # the next one is gathered before this name is bound again

    setup.control.agree("export", str(path), what=f"export to {str(path)!r}")

    def write() -> list[str]:
        if setup.topology.rank == 0:
            made = export_safetensors(tensors(), plan, path, setup.io(), max_shard_bytes=max_shard_bytes)
            return [str(file) for file in made]
        for _ in tensors():
            pass
        return []

    files = together(setup.control, "export-written", write, what="export")
    found: list[str] = setup.control.decide("export-files", files, what="export")
    return found
