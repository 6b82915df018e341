"""Reads the parameters of a model's parts: names, ties, mesh, before a data-parallel plugin touches them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from polyscale.interfaces.parallelism import Part
from polyscale.parameters.info import ParamInfo
from polyscale.parameters.names import public_name


@dataclass(frozen=True)
class FoundParameter:
    """A parameter of the model.

    Attributes:
        fqn: its canonical name.
        tied_to: its other names.
        parameter: the object.
        raw: its first name as the module tree has it, wrappers included.
    """

    fqn: str
    tied_to: tuple[str, ...]
    parameter: nn.Parameter
    raw: str


def find_parameters(parts: list[Part]) -> list[FoundParameter]:
    """List every parameter once, in registration order; a tied one under its first name."""
    names: dict[int, list[str]] = {}
    raws: dict[int, str] = {}
    objects: dict[int, nn.Parameter] = {}
    for part in parts:
        for name, parameter in part.module.named_parameters(remove_duplicate=False):
            raw = f"{part.prefix}.{name}" if part.prefix else name
            raws.setdefault(id(parameter), raw)
            full = public_name(raw)
            known = names.setdefault(id(parameter), [])
            if full not in known:
                known.append(full)
            objects[id(parameter)] = parameter
    return [FoundParameter(known[0], tuple(known[1:]), objects[key], raws[key]) for key, known in names.items()]


def master_dtype(parameter: torch.Tensor, wanted: torch.dtype | None) -> torch.dtype:
    """Dtype in which the optimizer updates ``parameter``: ``wanted``, else fp32, else its own if that is wider."""
    if not parameter.is_floating_point():
        return parameter.dtype
    if wanted is not None:
        return wanted
    return torch.promote_types(parameter.dtype, torch.float32)


def numel(parts: list[Part]) -> int:
    """Number of elements of all parameters, tied ones once."""
    return sum(found.parameter.numel() for found in find_parameters(parts))


def mesh_of(parameter: torch.Tensor) -> tuple[Any, tuple[Any, ...]]:
    """Return (mesh, placements) of a DTensor; (None, ()) of another tensor."""
    mesh = getattr(parameter, "device_mesh", None)
    return (None, ()) if mesh is None else (mesh, tuple(parameter.placements))  # type: ignore[attr-defined]


def shards(mesh: Any, placements: tuple[Any, ...]) -> int:
    """Into how many different parts the axes of ``mesh`` cut a tensor."""
    count = 1
    for axis, placement in enumerate(placements):
        count *= 1 if placement.is_replicate() else mesh.size(axis)
    return count


def as_dtensor(local: torch.Tensor, like: Any) -> Any:
    """Return ``local`` as a DTensor with the mesh, placements and shape of ``like``; as it is if that is none."""
    if not hasattr(like, "device_mesh"):
        return local
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def describe(entry: FoundParameter, held: torch.Tensor, *, world_size: int) -> ParamInfo:
    """Return what core keeps about a parameter.

    Args:
        entry: the parameter before data parallelism.
        held: what the data-parallel plugin made of it; its placements tell how many ranks hold each element.
        world_size: number of ranks.
    """
    mesh, placements = mesh_of(entry.parameter)
    return ParamInfo(
        fqn=entry.fqn,
        shape=tuple(entry.parameter.shape),
        dtype=held.dtype,
        requires_grad=entry.parameter.requires_grad,
        mesh=mesh,
        placements=placements,
        multiplicity=world_size // shards(*mesh_of(held)),
        tied_to=entry.tied_to,
    )
