"""The zero plugin: lays parameters into flat buffers and connects what gathers, reduces and stores them."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Literal

import torch
from torch import nn

from polyscale.errors import UnsupportedError
from polyscale.hooks import PluginContext, hookimpl
from polyscale.interfaces.parallelism import DataParallelApplied, Holding, ParallelContext, Part
from polyscale.parameters.info import ParamInfo
from polyscale.parameters.inspect import FoundParameter, as_dtensor, find_parameters, mesh_of, shards
from polyscale.parameters.start import broadcast_from_first, fill_buffers, start_value
from polyscale.parameters.units import choose_units
from polyscale_standard.casting import cast_whole_model, pinned_names
from polyscale_zero import _torch
from polyscale_zero.agreement import VisitAgreement
from polyscale_zero.bindings import Bindings
from polyscale_zero.common import CommonMemory, require_common_memory
from polyscale_zero.epoch import Epoch, explain_outdated
from polyscale_zero.flat import Flat, Sharding
from polyscale_zero.gathering import Gathering
from polyscale_zero.gradients import FlatGradients
from polyscale_zero.options import HONOURED, Options, buffer_numel, limits, read_options, set_number
from polyscale_zero.planning import (
    Plan,
    Rules,
    around_units,
    half_a_unit,
    owners,
    persistent,
    plans,
    refuse_complex,
    with_leaves,
)
from polyscale_zero.released import explain, is_released
from polyscale_zero.store import FlatStore
from polyscale_zero.unit import Unit

log = logging.getLogger("polyscale")

Place = tuple[nn.Module, str]


class ZeroPlugin:
    """Entry point ``zero``."""

    interface_version = (1, 0)

    @hookimpl
    def polyscale_parallelism(self, context: PluginContext) -> Zero:
        """Hand over sharded data parallelism on flat buffers."""
        return Zero(read_options(context.options))


class Zero:
    """Data parallelism of stages 1 to 3. Options: see :class:`polyscale_zero.options.Options`."""

    name = "zero"
    role: Literal["data"] = "data"
    stages = (1, 2, 3)
    honours: frozenset[str] = HONOURED

    def __init__(self, options: Options | None = None) -> None:
        self.options = options or Options()

    def apply(self, parts: list[Part], context: ParallelContext) -> DataParallelApplied:
        """See the Protocol. Parameters become views of flat buffers, the same objects wherever torch allows it."""
        build = _Build(parts, context, self.options)
        return build.applied()


@dataclass
class _Build:
    """What is made on the way, and at last joined."""

    parts: list[Part]
    context: ParallelContext
    options: Options
    units: list[Unit] = field(default_factory=list)
    flats: list[Flat] = field(default_factory=list)
    replaced: dict[nn.Parameter, nn.Parameter] = field(default_factory=dict)

    def applied(self) -> DataParallelApplied:
        context, config = self.context, self.context.config
        self._refuse()
        found = find_parameters(self.parts)
        pinned = pinned_names(found, context.precision)
        sharding = _sharding(context)
        self._lay_out(found, pinned, sharding)
        handles = cast_whole_model(self.parts, context.precision.parameter, pinned)
        infos = {entry.fqn: self._info(entry, sharding) for entry in found}
        elements = {
            fqn: nn.Parameter(flat.fragments[fqn], requires_grad=parameter.requires_grad)
            for flat in self.flats
            for fqn, parameter in flat.parameters.items()
        }
        epoch = Epoch(part.module for part in self.parts)
        shared = [flat for flat in self.flats if flat.shared]
        common = CommonMemory(shared, sharding, check=self.options.check_shared_memory)
        store = FlatStore(
            self.parts, infos, context, self.flats, elements, sharding=sharding, changed=epoch.advance, common=common
        )
        bindings = Bindings(self.parts, self.flats, lambda: store.gathering > 0)
        gathering = self._gathering(sharding, epoch)
        gradients = FlatGradients(
            self.units,
            elements,
            context,
            sharding,
            common,
            began=gathering.begin_backward if gathering is not None else lambda: None,
            ended=gathering.end_backward if gathering is not None else lambda: None,
            overlap=config.zero_optimization.overlap_comm is not False,
        )

        closing: list[Callable[[], object]] = [
            gradients.close,
            epoch.close,
            bindings.close,
            *(handle.remove for handle in handles),
        ]
        recovering: list[Callable[[], object]] = [gradients.recover]
        if gathering is not None:
            closing.append(gathering.close)
            recovering.append(gathering.recover)
        return DataParallelApplied(
            parts=self.parts,
            replaced=self.replaced,
            close=partial(_call, closing),
            store=store,
            gradients=gradients,
            explain=lambda error: explain(error) or explain_outdated(error),
            recover=partial(_call, recovering),
            holdings=lambda: chain(gradients.holdings(), self._holdings()),
        )

    def _gathering(self, sharding: Sharding, epoch: Epoch) -> Gathering | None:
        """What gathers and frees the units; None where all parameters stay."""
        if not any(unit.freed for unit in self.units):
            return None
        return Gathering(
            self.units,
            VisitAgreement(sharding, [unit.label for unit in self.units]),
            limits(self.context.config),
            self.context.note,
            epoch=lambda: epoch.number,
            stale=epoch.check,
        )

    def _holdings(self) -> Iterator[Holding]:
        for flat in self.flats:
            if flat.master is not flat.shard or not flat.kind.resident:
                yield Holding("gathered parameters", flat.name, flat.whole)

    def _refuse(self) -> None:
        context = self.context
        stage = context.config.zero_optimization.stage
        require_common_memory(self.options, context.communication, stage=stage, device=context.device)
        refuse_complex(find_parameters(self.parts))
        for part in self.parts:
            for name, module in part.named_modules():
                if any(map(is_released, module._parameters.values())):
                    raise UnsupportedError(
                        f"The module {name or 'model'!r} is already sharded by zero",
                        why="its shards belong to an engine, perhaps one that was closed",
                        fix="Build the model again, and restore its weights with engine.load",
                    )

    def _lay_out(self, found: list[FoundParameter], pinned: frozenset[str], sharding: Sharding) -> None:
        """Make the units and their buffers, and fill them."""
        config = self.context.config
        modules = [unit for part in self.parts for unit in self._unit_modules(part)]
        owner = owners(found, [part.module for part in self.parts], modules)
        resident: frozenset[str] | None = None
        if config.zero_optimization.stage == 3 and sharding.world > 1:
            resident = persistent(
                found,
                threshold=set_number(config, "stage3_param_persistence_threshold"),
                total=set_number(config, "stage3_model_persistence_threshold"),
            )
        on_cpu = self.context.device.type == "cpu"
        widest = max((entry.parameter.itemsize for entry in found), default=4)
        most = buffer_numel(config, itemsize=max(4, widest), on_cpu=on_cpu)  # gradients and masters of bf16 are fp32
        if config.zero_optimization.stage > 1 and not on_cpu:
            most = min(most, half_a_unit(found, owner))
        rules = Rules(self.context.precision, pinned, resident, most)
        names = {id(module): name for part in self.parts for name, module in part.named_modules()}
        meshes: list[object] = []
        places = _places(self.parts)
        root = self.parts[0].module
        made = [*((names[id(m)], m, False) for m in modules), ("", root, True)]
        for number, (name, module, is_root) in enumerate(made):
            unit = Unit(name, module, is_root=is_root)
            self.units.append(unit)
            wanted = -1 if is_root else number
            members = [entry for entry in found if owner[entry.fqn] == wanted]
            for group in around_units(found, owner) if is_root else [members]:
                for plan in plans(group, rules, meshes):
                    self._make_flat(unit, plan, sharding, places)
        for part in self.parts:
            for name, module in part.named_modules():
                fill_buffers(module, name, self.context)
        listed = ", ".join(f"{n} x {cls}" for cls, n in Counter(type(m).__name__ for m in modules).items())
        log.info("zero units: %s", listed or "none: the whole model is one")

    def _unit_modules(self, part: Part) -> list[nn.Module]:
        units = choose_units(part.module, self.options.unit_classes, plugin="zero", sharing=True)
        leaf = self.context.config.zero_optimization.leaf_module
        return with_leaves(part.module, units, leaf.classes, leaf.names, leaf.name_suffixes)

    @torch.no_grad()
    def _make_flat(self, unit: Unit, plan: Plan, sharding: Sharding, places: dict[str, list[Place]]) -> None:
        label = f"{unit.label} ({plan.members[0].fqn} ...)" if len(plan.members) > 1 else plan.members[0].fqn
        parameters = {entry.fqn: entry.parameter for entry in plan.members}
        shared = self.options.share_host_memory and plan.kind.resident and sharding.world > 1
        flat = Flat(label, plan.kind, parameters, sharding, shared=shared)
        for entry in plan.members:
            flat.fill(entry.fqn, self._start_value(entry))
            parameter = _pointed_to(flat.view(flat.whole, entry.fqn), entry.parameter)
            if parameter is not entry.parameter:
                self.replaced[entry.parameter] = parameter
                parameters[entry.fqn] = parameter
                for module, attribute in places[entry.fqn]:
                    setattr(module, attribute, parameter)  # recurrent modules keep lists of theirs, which this renews
        if shared:
            self.context.communication.barrier(sharding.reduce).wait_host()
        unit.flats.append(flat)
        self.flats.append(flat)
        if not plan.kind.resident:
            flat.release()

    def _start_value(self, entry: FoundParameter) -> torch.Tensor:
        """The starting value of this rank's part on model-parallel axes, equal on data-parallel ranks."""
        parameter = entry.parameter
        if not hasattr(parameter, "device_mesh"):
            return start_value(entry.raw, parameter, self.context)
        local = _torch.inner(parameter).detach().to(self.context.device)
        if self.context.topology.dp_size > 1 and local.numel():
            broadcast_from_first(local, self.context)
        return local

    def _info(self, entry: FoundParameter, sharding: Sharding) -> ParamInfo:
        mesh, placements = mesh_of(entry.parameter)
        flat = next(flat for flat in self.flats if entry.fqn in flat.parameters)
        return ParamInfo(
            fqn=entry.fqn,
            shape=tuple(entry.parameter.shape),
            dtype=flat.kind.master,
            requires_grad=entry.parameter.requires_grad,
            mesh=mesh,
            placements=placements,
            multiplicity=self.context.topology.world_size // (shards(mesh, placements) * sharding.world),
            tied_to=entry.tied_to,
        )


def _call(functions: list[Callable[[], object]]) -> None:
    for function in functions:
        function()


def _sharding(context: ParallelContext) -> Sharding:
    topology = context.topology
    world = topology.size("dp_shard")
    return Sharding(
        communication=context.communication,
        device=context.device,
        gather=topology.group("gather") if world > 1 else None,
        reduce=topology.group("shard") if world > 1 else None,
        replicate=topology.group("replicate") if topology.size("dp_replicate") > 1 else None,
        world=world,
        rank=topology.coordinate("dp_shard"),
    )


def _pointed_to(view: torch.Tensor, parameter: nn.Parameter) -> nn.Parameter:
    """The parameter over the memory of ``view``: the same object where torch allows it."""
    inner = _torch.inner(parameter)
    if not parameter.is_meta and (inner is parameter or inner.dtype == view.dtype):  # a DTensor states its dtype itself
        try:
            inner.data = view
            return parameter
        except RuntimeError:  # "incompatible tensor type": memory of another device
            pass
    made = nn.Parameter(as_dtensor(view, parameter), requires_grad=parameter.requires_grad)
    vars(made).update({key: value for key, value in vars(parameter).items() if not key.startswith("_")})
    return made


def _places(parts: list[Part]) -> dict[str, list[Place]]:
    """Canonical name -> every place that holds the parameter."""
    by_id: dict[int, list[Place]] = {}
    for part in parts:
        for module in part.module.modules():
            for attribute, parameter in module._parameters.items():
                if parameter is not None:
                    by_id.setdefault(id(parameter), []).append((module, attribute))
    return {entry.fqn: by_id[id(entry.parameter)] for entry in find_parameters(parts)}
