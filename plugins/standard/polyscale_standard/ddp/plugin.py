"""The ddp plugin: keeps the model whole, lifts or lowers dtypes, builds buckets and store."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from torch import nn

from polyscale.errors import ConfigError
from polyscale.hooks import PluginContext, hookimpl
from polyscale.interfaces.parallelism import DataParallelApplied, ParallelContext, Part
from polyscale.parameters.inspect import FoundParameter, describe, find_parameters, master_dtype
from polyscale.parameters.sharded_store import local_tensor
from polyscale.parameters.start import fill_whole
from polyscale_standard.casting import cast_whole_model, pinned_modules, pinned_names
from polyscale_standard.ddp.buckets import BucketedGradients
from polyscale_standard.ddp.store import ReplicatedStore

BUCKET_MIB = 25


class DdpPlugin:
    """Entry point ``ddp``."""

    interface_version = (1, 0)

    @hookimpl
    def polyscale_parallelism(self, context: PluginContext) -> Ddp:
        """Hand over data parallelism without sharding."""
        return Ddp(bucket_mib=_bucket_mib(context.options))


class Ddp:
    """Data parallelism of stage 0. Option ``bucket_mib``: size of a bucket (MiB, default 25)."""

    name = "ddp"
    role: Literal["data"] = "data"
    stages = (0,)
    honours: frozenset[str] = frozenset()

    def __init__(self, *, bucket_mib: float = BUCKET_MIB) -> None:
        self.bucket_bytes = int(bucket_mib * 2**20)

    def apply(self, parts: list[Part], context: ParallelContext) -> DataParallelApplied:
        """See the Protocol. Parameters stay whole in the modules; bf16 and fp16 get separate fp32 masters."""
        before = {entry.fqn: entry.parameter for entry in find_parameters(parts)}
        pinned = pinned_names(find_parameters(parts), context.precision)
        fill_whole(parts, context)
        found = find_parameters(parts)
        computed = {entry.fqn: entry.parameter for entry in found}
        kept = {id(parameter) for module in pinned_modules(parts, pinned) for parameter in module.parameters(False)}
        masters = {entry.fqn: _make_master(entry, context, kept) for entry in found}
        handles = cast_whole_model(parts, context.precision.parameter, pinned)
        world = context.topology.world_size
        infos = {entry.fqn: describe(entry, masters[entry.fqn], world_size=world) for entry in found}
        elements = {fqn: _element(master) for fqn, master in masters.items()}
        gradients = BucketedGradients(computed, masters, elements, context, self.bucket_bytes)
        store = ReplicatedStore(parts, infos, masters, elements, computed, context)

        def close() -> None:
            gradients.close()
            for handle in handles:
                handle.remove()
            for fqn, master in masters.items():
                if computed[fqn] is not master:  # the module keeps what was trained, not its 16-bit copy
                    computed[fqn].data = master.data

        replaced = {before[fqn]: master for fqn, master in masters.items() if before[fqn] is not master}
        return DataParallelApplied(
            parts=parts,
            replaced=replaced,
            close=close,
            store=store,
            gradients=gradients,
            recover=gradients.recover,
            holdings=gradients.holdings,
        )


def _element(master: nn.Parameter) -> nn.Parameter:
    """What element-wise optimizers update: the master, or the local part of one that is a DTensor."""
    if not hasattr(master, "device_mesh"):
        return master
    return nn.Parameter(local_tensor(master.data), requires_grad=master.requires_grad)


def _make_master(entry: FoundParameter, context: ParallelContext, pinned: set[int]) -> nn.Parameter:
    """Return the parameter itself when it computes in its master's dtype, else a separate master copy."""
    parameter = entry.parameter
    dtype = master_dtype(parameter, context.precision.master)
    compute = context.precision.parameter
    if compute is None or compute == dtype or id(parameter) in pinned or not parameter.is_floating_point():
        parameter.data = parameter.data.to(dtype)
        return parameter
    master = nn.Parameter(parameter.detach().to(dtype, copy=True), requires_grad=parameter.requires_grad)
    parameter.data = parameter.data.to(compute)
    return master


def _bucket_mib(options: Mapping[str, Any]) -> float:
    unknown = set(options) - {"bucket_mib"}
    value = options.get("bucket_mib", BUCKET_MIB)
    if unknown or not isinstance(value, (int, float)) or value <= 0:
        raise ConfigError(
            f"backends.options.ddp = {dict(options)!r}",
            why="its one option is bucket_mib, a positive number of MiB",
            fix=f'Write {{"bucket_mib": {BUCKET_MIB}}}',
        )
    return float(value)
