"""Writes weights and persistent buffers as safetensors, keyed as the model's ``state_dict()``.

Notable: everything that can be refused (the I/O plugin, a dtype that the format lacks) is refused on all ranks before
the first tensor is gathered, because gathering is collective: a rank that had left would be waited for.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from polyscale.checkpoint.export import export_safetensors
from polyscale.checkpoint.safetensors_layout import Plan, lay_out
from polyscale.engine.setup import Setup
from polyscale.engine.together import on_first, together
from polyscale.parameters.names import public_name

if TYPE_CHECKING:
    from polyscale.engine.engine import Engine


def export(engine: Engine, setup: Setup, path: str | os.PathLike[str], *, max_shard_bytes: int) -> list[str]:
    """See ``Engine.export``. Rank 0 writes; every rank takes part in assembling each tensor."""
    control, what, store = setup.control, f"export to {str(path)!r}", setup.applied.store
    control.agree("export", str(Path(path).absolute()), what=what)
    parameters = {name: info for info in store.infos.values() for name in info.names}
    buffers = _buffers(setup.model)

    def prepare() -> Plan:
        setup.io()
        plan = [
            (name, parameters[name].shape, parameters[name].dtype)
            if name in parameters
            else (name, tuple(buffers[name].shape), buffers[name].dtype)
            for name in _order(setup.model)
            if name in parameters or name in buffers
        ]
        lay_out(plan, {}, max_shard_bytes)
        return plan

    plan = together(control, "export-plan", prepare, what=what)

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for name, _, _ in plan:
            full = store.get_full(name) if name in parameters else buffers[name]
            assert full is not None
            yield name, full.detach().to("cpu")
            del full  # the next one is gathered before this name is bound again

    def write() -> list[str]:
        files = export_safetensors(tensors(), plan, path, setup.io(), max_shard_bytes=max_shard_bytes)
        return [str(file) for file in files]

    if setup.topology.rank != 0:
        for _ in tensors():
            pass
    return on_first(control, "export-written", write, what=what)


def _order(model: torch.nn.Module) -> Iterator[str]:
    """Names of parameters and buffers in the order of ``state_dict()``, each name of a tied parameter included."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        for key in (*module._parameters, *module._buffers):
            yield public_name(f"{prefix}.{key}" if prefix else key)


def _buffers(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {
        public_name(f"{prefix}.{key}" if prefix else key): buffer
        for prefix, module in model.named_modules(remove_duplicate=False)
        for key, buffer in module._buffers.items()
        if buffer is not None and key not in module._non_persistent_buffers_set
    }
