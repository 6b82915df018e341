"""``zero_optimization``: what is sharded, and how.

Notable: every key is typed, whatever its status, so that a data-parallel plugin that honours more of them (offload,
quantized communication) finds checked values. A reason says why a key has no effect where the chosen plugin does not
honour it: fsdp2 shards whole units with torch's fully_shard, which knows no buckets and prefetch distances.
"""

from __future__ import annotations

import sys
from typing import ClassVar, Literal

from polyscale.config.section import Int, Section, honoured, needs_plugin, no_effect, not_built

_UNITS = "communication follows shard units (blocks of the model), not buckets of a given size"
_LIVE = "a unit's parameters are gathered before it runs and freed after it, one unit ahead"
_FLAT = "the data-parallel plugin decides how gradients lie in memory"
_STAGE3 = '"stage": 3, which shards parameters over all devices'
_HSDP = "topology.dp_shard (ranks that share the state) with topology.dp_replicate (copies of that group)"

Size = Int | Literal["auto"]


class OffloadParamSection(Section):
    """Where sharded parameters rest between uses."""

    switch: ClassVar = ("device", ("none", None))

    device: Literal["none", "cpu", "nvme"] = honoured("none", "Tier that holds the shards.")
    nvme_path: str | None = honoured(None, "Folder on a fast disk, for device nvme.")
    buffer_count: Int = honoured(5, "Buffers in the pool.", ge=1)
    buffer_size: Int = honoured(100_000_000, "Elements of one buffer.", ge=1)
    max_in_cpu: Int = honoured(1_000_000_000, "Elements kept in host memory when device is nvme.", ge=0)
    pin_memory: bool = honoured(True, "Use page-locked host memory.")


class OffloadOptimizerSection(Section):
    """Where optimizer states rest, and where the update runs."""

    switch: ClassVar = ("device", ("none", None))

    device: Literal["none", "cpu", "nvme"] = honoured("none", "Tier that holds the states.")
    nvme_path: str | None = honoured(None, "Folder on a fast disk, for device nvme.")
    buffer_count: Int = honoured(4, "Buffers in the pool.", ge=1)
    pin_memory: bool = honoured(True, "Use page-locked host memory.")
    pipeline_read: bool = honoured(False, "Read the next tile during the update of this one.")
    pipeline_write: bool = honoured(False, "Write the last tile during the update of this one.")
    fast_init: bool = honoured(False, "Initialise states on disk without reading them.")
    ratio: float = honoured(1.0, "Share of the states that is offloaded.", ge=0, le=1)
    super_offload: bool = honoured(False, "Host updates for tightly coupled chips.")
    cpuadam_cores_perc: float = honoured(0.8, "Share of the host's cores for the update.", gt=0, le=1)


class ZenflowSection(Section):
    """Important gradients are applied on the device, the rest later on the host."""

    presence: ClassVar = True

    topk_ratio: float = honoured(0.1, "Share of gradient columns that count as important.", ge=0, le=1)
    select_strategy: Literal["auto", "step", "epoch"] = honoured("auto", "How the selection is renewed.")
    select_interval: Size = honoured("auto", "Steps or epochs between selections.")
    update_interval: Size = honoured("auto", "Steps between host updates.")
    overlap_step: bool = honoured(False, "Host updates overlap device steps.")
    offload: bool = honoured(False, "Selected states are offloaded too.")
    auto_ratio: float = honoured(0.99, "Threshold of the automatic interval.", ge=0, le=1)
    full_warm_up_rounds: Int = honoured(0, "Rounds with full updates at the start.", ge=0)
    pt_reserved_cores_perc: float = honoured(0.5, "Share of the host's cores left to torch.", ge=0, le=1)


class LocoSection(Section):
    """Error feedback for quantized gradients."""

    presence: ClassVar = True

    err_beta: float = honoured(0.8, "Decay of the error.", ge=0, le=1)
    reset_T: Int = honoured(1024, "Steps after which the error is dropped.", ge=1)


class LeafModuleSection(Section):
    """Modules below which no parameter is gathered by itself."""

    classes: list[str] = honoured([], "Class names.")
    names: list[str] = honoured([], "Module names.")
    name_suffixes: list[str] = honoured([], "Ends of module names.")


class StageKeys(Section):
    """What is sharded."""

    stage: Int = honoured(
        0, "What is sharded: 0 nothing, 1 optimizer states, 2 also gradients, 3 also parameters.", ge=0, le=3
    )
    ignore_unused_parameters: bool = no_effect(
        True, "Accept parameters without a gradient.", reason="unused parameters are handled at every stage"
    )
    legacy_stage1: bool = not_built(False, "An older stage 1.", nearest='"stage": 1')
    parameter_alignment: bool = no_effect(False, "Align parameters in flat buffers.", reason=_FLAT)
    compute_grad_norm: bool = no_effect(
        True, "Compute the gradient norm.", reason="it is computed where clipping or an observer needs it"
    )


class CommunicationKeys(Section):
    """Keys about when and in what portions gradients and parameters travel."""

    contiguous_gradients: bool = no_effect(True, "Copy gradients to a flat buffer.", reason=_FLAT)
    reduce_scatter: bool = no_effect(
        True, "Reduce-scatter gradients rather than all-reduce them.", reason="sharded gradients are reduce-scattered"
    )
    reduce_bucket_size: Size = no_effect(500_000_000, "Elements per reduction.", reason=_UNITS)
    use_multi_rank_bucket_allreduce: bool = no_effect(
        True, "One all-reduce for a bucket of several owners.", reason=_UNITS
    )
    allgather_partitions: bool = no_effect(
        True, "All-gather parameters rather than broadcast them.", reason="sharded parameters are all-gathered"
    )
    allgather_bucket_size: Size = no_effect(500_000_000, "Elements per all-gather.", reason=_UNITS)
    overlap_comm: bool | None = no_effect(
        None, "Reduce while the backward runs.", reason="communication overlaps compute wherever the device allows it"
    )
    round_robin_gradients: bool = no_effect(False, "Spread gradient copies over ranks.", reason=_FLAT)
    zero_hpz_partition_size: Int = needs_plugin(1, "Ranks of the secondary shard of ZeRO++ (hpZ).", nearest=_HSDP, ge=1)
    zero_quantized_weights: bool = needs_plugin(
        False, "Gather int8 weights (qwZ).", nearest="bf16 (bf16.enabled), which halves the gathered bytes"
    )
    zero_quantized_nontrainable_weights: bool = needs_plugin(
        False, "Gather int8 frozen weights.", nearest="bf16 (bf16.enabled), which halves the gathered bytes"
    )
    zero_quantized_gradients: bool = needs_plugin(
        False, "Reduce quantized gradients (qgZ).", nearest='communication_data_type: "bf16"'
    )
    zeropp_loco_param: LocoSection | None = needs_plugin(
        None, "Error feedback for qgZ (LoCo).", nearest='communication_data_type: "bf16"'
    )
    mics_shard_size: Int = needs_plugin(-1, "Ranks that share one copy of the state (MiCS).", nearest=_HSDP, ge=-1)
    mics_hierarchical_params_gather: bool = needs_plugin(False, "Gather within the host first (MiCS).", nearest=_HSDP)


class Stage3Keys(Section):
    """Keys about gathered parameters."""

    sub_group_size: Size = no_effect(
        1_000_000_000, "Elements per tile of the update.", reason="the update runs on all local shards at once", ge=1
    )
    stage3_prefetch_bucket_size: Size = no_effect(50_000_000, "Elements fetched ahead.", reason=_LIVE)
    stage3_param_persistence_threshold: Size = no_effect(100_000, "Smaller parameters stay whole.", reason=_LIVE)
    stage3_model_persistence_threshold: Size = no_effect(sys.maxsize, "Cap on what stays whole.", reason=_LIVE)
    stage3_max_live_parameters: Size = no_effect(1_000_000_000, "Gathered elements at a time.", reason=_LIVE)
    stage3_max_reuse_distance: Size = no_effect(
        1_000_000_000, "Keep a parameter that is used again within this distance.", reason=_LIVE
    )
    stage3_gather_16bit_weights_on_model_save: bool = no_effect(
        False, "Allow saving whole 16-bit weights.", reason="weights export to safetensors from every stage"
    )
    stage3_module_granularity_threshold: Int = no_effect(
        0, "Fetch finer modules as one.", reason="units are whole blocks already", ge=0
    )
    stage3_use_all_reduce_for_fetch_params: bool = no_effect(False, "Fetch by all-reduce.", reason=_LIVE)
    stage3_allgather_sequential: bool = no_effect(False, "Gather parameters one by one.", reason=_LIVE)
    memory_efficient_linear: bool = no_effect(
        True, "Replace F.linear.", reason="torch's autograd keeps no gathered copy of a unit"
    )
    pipeline_loading_checkpoint: bool = no_effect(
        False, "Ranks load one after another.", reason="each rank reads only what it holds"
    )
    override_module_apply: bool = no_effect(
        True,
        "Module.apply gathers parameters first.",
        reason="parameters are sharded after the model is initialised, or materialised from a seed",
    )
    log_trace_cache_warnings: bool = no_effect(False, "Warn when the fetch order changes.", reason=_LIVE)
    enable_sanity_checks: bool = no_effect(
        False, "Check fetches.", reason="ranks that gather different units are always found"
    )
    leaf_module: LeafModuleSection = no_effect(
        LeafModuleSection, "Modules that are gathered as a whole.", reason="units are whole blocks already"
    )


class StateKeys(Section):
    """Keys about where states live and how they are saved."""

    offload_param: OffloadParamSection | None = needs_plugin(
        None, "Parameters rest on the host or on NVMe.", nearest=_STAGE3
    )
    offload_optimizer: OffloadOptimizerSection | None = needs_plugin(
        None, "Optimizer states rest on the host or on NVMe.", nearest=_STAGE3
    )
    zenflow: ZenflowSection | None = needs_plugin(None, "Asynchronous host updates.", nearest=_STAGE3)
    cpu_offload: bool | None = needs_plugin(None, "Deprecated form of offload_optimizer.", nearest=_STAGE3)
    cpu_offload_param: bool | None = needs_plugin(None, "Deprecated form of offload_param.", nearest=_STAGE3)
    cpu_offload_use_pin_memory: bool | None = no_effect(
        None, "Deprecated form of pin_memory.", reason="nothing is offloaded"
    )
    load_from_fp32_weights: bool = no_effect(
        True, "Masters are loaded from fp32.", reason="checkpoints always hold the masters"
    )
    elastic_checkpoint: bool = no_effect(
        False, "Optimizer states load at another world size.", reason="every checkpoint does"
    )
    save_muon_momentum_buffer_in_memory: bool = no_effect(
        False, "Muon's momentum stays off NVMe.", reason="nothing is offloaded"
    )


class ZeroSection(StateKeys, Stage3Keys, CommunicationKeys, StageKeys):
    """Sharding of optimizer states (1), gradients (2) and parameters (3) over data-parallel ranks."""
