"""The fsdp2 plugin: applies ``fully_shard`` unit by unit and fills the shards.

Notable: the collectives sum (no averaging inside FSDP2), because the engine applies one fp32 factor at the update.
Parameters that ``fully_shard`` cannot take stay whole: empty ones, which have nothing to train, and scalars, whose
gradients ``gradients`` sums itself. FSDP2 is imported when the plugin is applied, not before.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch
from torch import nn

from polyscale._torch import fsdp_memory, tree_map
from polyscale.errors import ConfigError, UnsupportedError, nearest
from polyscale.hooks import PluginContext, hookimpl
from polyscale.interfaces.parallelism import DataParallelApplied, Holding, ParallelContext, Part
from polyscale.parameters.boxes import sharded_region
from polyscale.parameters.inspect import FoundParameter, describe, find_parameters, master_dtype, mesh_of
from polyscale.parameters.start import fill_buffers, fill_whole, start_value
from polyscale.parameters.units import choose_units
from polyscale_standard.casting import pinned_modules, pinned_names
from polyscale_standard.fsdp2.calls import UnitCalls, second_derivative
from polyscale_standard.fsdp2.gradients import ShardedGradients
from polyscale_standard.fsdp2.store import DTensorStore

log = logging.getLogger("polyscale")

OPTIONS = ("unit_classes",)


class Fsdp2Plugin:
    """Entry point ``fsdp2``."""

    interface_version = (1, 0)

    @hookimpl
    def polyscale_parallelism(self, context: PluginContext) -> Fsdp2:
        """Hand over PyTorch's fully sharded data parallelism."""
        return Fsdp2(unit_classes=_unit_classes(context.options))


class Fsdp2:
    """Data parallelism of stages 1 to 3. Option ``unit_classes``: class names of the units (default: found)."""

    name = "fsdp2"
    role: Literal["data"] = "data"
    stages = (1, 2, 3)
    honours: frozenset[str] = frozenset()

    def __init__(self, *, unit_classes: tuple[str, ...] | None = None) -> None:
        self.unit_classes = unit_classes

    def apply(self, parts: list[Part], context: ParallelContext) -> DataParallelApplied:
        """See the Protocol. ``fully_shard`` replaces parameters and changes the classes of its modules in place."""
        _refuse_sharded(parts)
        found = find_parameters(parts)
        pinned = pinned_names(found, context.precision)
        _refuse_mixed_dtypes(found, context)
        on_meta = any(entry.parameter.is_meta for entry in found)
        if on_meta:
            _empty_masters(parts, context)
        else:
            _lift_masters(found, context)
            fill_whole(parts, context)
        lifted = find_parameters(parts)
        whole = {entry.fqn: entry.parameter for entry in lifted if not _shardable(entry.parameter)}
        for part in parts:
            kept = pinned_modules([part], pinned)
            _refuse_shared(kept, part.module)
            _shard(part.module, context, self.unit_classes, kept, set(whole.values()))
        if on_meta:
            _fill_shards(parts, context)
        sharded = {entry.fqn: entry.parameter for entry in find_parameters(parts)}
        world = context.topology.world_size
        infos = {entry.fqn: describe(entry, sharded[entry.fqn], world_size=world) for entry in lifted}
        store = DTensorStore(parts, infos, sharded, context)
        calls = UnitCalls(parts, context.note)
        gradients = ShardedGradients(parts, store, context, calls)

        def close() -> None:
            gradients.close()
            calls.close()

        replaced = {entry.parameter: sharded[entry.fqn] for entry in found}
        return DataParallelApplied(
            parts=parts,
            replaced=replaced,
            close=close,
            store=store,
            gradients=gradients,
            explain=explain_bypass,
            recover=gradients.recover,
            holdings=lambda: _holdings(parts, store),
        )


def _holdings(parts: list[Part], store: DTensorStore) -> Iterator[Holding]:
    """Gathered parameters, gradients before their reduction, buffers of collectives."""
    names = {id(parameter): fqn for fqn, parameter in store.sharded.items()}
    for part in parts:
        for kind, name, tensor in fsdp_memory(part.module, lambda parameter: names.get(id(parameter), "a parameter")):
            yield Holding(kind, name, tensor)


def explain_bypass(error: Exception) -> UnsupportedError | None:
    """Say what torch's errors mean that sharding causes: a unit that is not called as one, a second derivative."""
    if "setStorage" in str(error) and "storage of size 0" in str(error):
        return second_derivative()
    if "mixed torch.Tensor and DTensor" not in str(error):
        return None
    return UnsupportedError(
        "A sharded parameter was used outside the forward of its unit",
        why="parameters are gathered when the unit's module is called, and the model calls a part of it, or uses its "
        "weight, directly",
        fix="Call the block as a whole (block(x)), or name the classes that are called in "
        "backends.options.fsdp2.unit_classes",
    )


def _shardable(parameter: torch.Tensor) -> bool:
    return parameter.dim() > 0 and parameter.numel() > 0


def _refuse_sharded(parts: list[Part]) -> None:
    from torch.distributed.fsdp import FSDPModule

    for part in parts:
        for name, module in part.module.named_modules():
            if isinstance(module, FSDPModule):
                raise UnsupportedError(
                    f"The module {name or 'model'!r} is already sharded by fully_shard",
                    why="its units and shards belong to whoever applied it, perhaps an engine that was closed",
                    fix="Build the model again, and restore its weights with engine.load",
                )


def _refuse_mixed_dtypes(found: list[FoundParameter], context: ParallelContext) -> None:
    dtypes: dict[torch.dtype, str] = {}
    for entry in found:
        if entry.parameter.requires_grad:
            dtypes.setdefault(master_dtype(entry.parameter, context.precision.master), entry.fqn)
    if len(dtypes) > 1:
        raise UnsupportedError(
            "Parameters of " + " and ".join(f"{dtype} ({fqn})" for dtype, fqn in dtypes.items()),
            why="fsdp2 reduces the gradients of a unit in one dtype",
            fix="Convert the model to one dtype first, or use zero_optimization.stage 0",
        )


def _lift_masters(found: list[FoundParameter], context: ParallelContext) -> None:
    """Bring every parameter to its master's dtype before it is sharded."""
    for entry in found:
        dtype = master_dtype(entry.parameter, context.precision.master)
        if entry.parameter.dtype != dtype:
            entry.parameter.data = entry.parameter.data.to(dtype)


def _empty_masters(parts: list[Part], context: ParallelContext) -> None:
    """Put an empty parameter of the master's dtype in the place of each one; the materializer has the values."""
    made: dict[int, nn.Parameter] = {}
    for part in parts:
        for module in part.module.modules():
            for key, parameter in module._parameters.items():
                if parameter is None:
                    continue
                if id(parameter) not in made:
                    dtype = master_dtype(parameter, context.precision.master)
                    empty = torch.empty_like(parameter, dtype=dtype, device="meta")
                    made[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
                module._parameters[key] = made[id(parameter)]


def _refuse_shared(pinned: list[nn.Module], root: nn.Module) -> None:
    """A pinned module is a unit of its own, so its parameters cannot be shared with another one."""
    owners = Counter(id(p) for module in root.modules() for p in module._parameters.values() if p is not None)
    for module in pinned:
        for name, parameter in module.named_parameters(recurse=False):
            if owners[id(parameter)] > 1:
                raise UnsupportedError(
                    f"data_types.keep_in_fp32_modules pins a tied weight ({name} of {type(module).__name__})",
                    why="fsdp2 shards what computes in fp32 apart from the rest, and a tied weight cannot be in both",
                    fix="Do not pin it, untie it, or use zero_optimization.stage 0",
                )


def _shard(
    module: nn.Module,
    context: ParallelContext,
    unit_classes: tuple[str, ...] | None,
    pinned: list[nn.Module],
    whole: set[nn.Parameter],
) -> None:
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    precision = context.precision
    policy = MixedPrecisionPolicy(param_dtype=precision.parameter, reduce_dtype=_reduce_dtype(module, context))
    common: dict[str, Any] = {
        "mesh": context.topology.data_mesh(),
        "reshard_after_forward": None if context.config.zero_optimization.stage == 3 else False,
        "ignored_params": whole or None,
    }
    if precision.parameter is not None:
        keep = MixedPrecisionPolicy(
            param_dtype=precision.master or torch.float32,
            reduce_dtype=policy.reduce_dtype,
            output_dtype=precision.parameter,
        )
        for part in pinned:
            fully_shard(part, mp_policy=keep, **common)
    units = choose_units(module, unit_classes)
    names = Counter(type(unit).__name__ for unit in units)
    listed = ", ".join(f"{count} x {name}" for name, count in names.items()) or "none: the whole model is one"
    log.info("fsdp2 units: %s", listed)
    for unit in (*units, module):
        if not isinstance(unit, FSDPModule):  # a pinned module may be a unit itself
            unit.register_forward_hook(_own_memory)  # before fully_shard, whose own hook sees what this returns
            fully_shard(unit, mp_policy=policy, **common)
    for child in module.modules():
        if isinstance(child, FSDPModule):
            child.set_gradient_divide_factor(1.0)
            child.set_force_sum_reduction_for_comms(True)


def _own_memory(_module: nn.Module, _inputs: Any, output: Any) -> Any:
    """Copy outputs that are views: changing one in place would take FSDP2's hook off it, and lose the gradient."""

    def copy(item: Any) -> Any:
        view = isinstance(item, torch.Tensor) and item.requires_grad and item._base is not None
        return item.clone() if view else item

    return tree_map(copy, output)


def _reduce_dtype(module: nn.Module, context: ParallelContext) -> torch.dtype | None:
    """Dtype of the reduction: as configured, but an fp64 model is reduced in fp64."""
    if any(parameter.dtype == torch.float64 for parameter in module.parameters()):
        return None
    return context.precision.reduction


@torch.no_grad()
def _fill_shards(parts: list[Part], context: ParallelContext) -> None:
    """Allocate the shards of a model on the meta device and fill them, one whole parameter in memory at a time."""
    for part in parts:
        buffers = {
            (id(module), key): value
            for module in part.module.modules()
            for key, value in module._buffers.items()
            if value is not None and not value.is_meta
        }
        part.module.to_empty(device=context.device)
        for name, module in part.named_modules():
            for key, emptied in module._buffers.items():
                if (id(module), key) in buffers:
                    module._buffers[key] = buffers[id(module), key]
                elif emptied is not None:
                    module._buffers[key] = emptied.to("meta")
            fill_buffers(module, name, context)
    for entry in find_parameters(parts):
        parameter = entry.parameter
        value = start_value(entry.raw, parameter, context).to(parameter.dtype)
        if not hasattr(parameter, "to_local"):
            parameter.copy_(value)
            continue
        parameter.to_local().copy_(sharded_region(tuple(value.shape), *mesh_of(parameter)).cut(value))


def _unit_classes(options: Mapping[str, Any]) -> tuple[str, ...] | None:
    for name in options:
        if name not in OPTIONS:
            raise ConfigError(
                f"backends.options.fsdp2.{name}",
                why="fsdp2 has no such option",
                fix=f"Did you mean {nearest(name, OPTIONS)!r}?" if nearest(name, OPTIONS) else f"Options: {OPTIONS}",
            )
    classes = options.get("unit_classes")
    if classes is None:
        return None
    if isinstance(classes, str) or not all(isinstance(name, str) for name in classes):
        raise ConfigError(
            f"backends.options.fsdp2.unit_classes = {classes!r}",
            why="it must be a list of class names",
            fix='Write for example ["GPT2Block"]',
        )
    return tuple(classes)
