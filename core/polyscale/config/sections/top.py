"""The keys of the top level that are not sections."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, AllowInfNan, Field

from polyscale.config.section import NEW, Int, Section, honoured, no_effect, not_built
from polyscale.config.sections.precision import Dtype

_MOE = "there is no expert parallelism in this version"
_COUNT: dict[str, Any] = {"ge": 1, "lt": 2**63}


def _infinite(value: float) -> float:
    if value != float("inf"):
        raise ValueError("Infinity")
    return value


Infinite = Annotated[float, AllowInfNan(True), AfterValidator(_infinite)]


class BatchKeys(Section):
    """Batch sizes and what happens to gradients."""

    train_batch_size: Int | None = honoured(
        None, "Samples of one update, over all ranks: micro-batch x accumulation x data-parallel ranks.", **_COUNT
    )
    train_micro_batch_size_per_gpu: Int | None = honoured(None, "Samples of one forward on one rank.", **_COUNT)
    gradient_accumulation_steps: Int | None = honoured(None, "Micro-steps of one update.", **_COUNT)
    gradient_clipping: float = honoured(
        0.0, "Largest global norm of the gradient; 0 does not clip.", deepspeed=1.0, ge=0
    )
    prescale_gradients: bool = honoured(
        False, "Divide gradients by gradient_predivide_factor before they are summed over ranks."
    )
    gradient_predivide_factor: float = honoured(
        1.0, "The divisor of prescale_gradients; the average is the same.", gt=0
    )
    communication_data_type: Dtype | None = honoured(
        None, "Dtype in which gradients are summed over ranks; null: that of the precision (fp32)."
    )
    seed: Int | None = honoured(None, "Seed of initial weights, dropout and data order.", deepspeed=NEW, ge=0, lt=2**63)
    gradient_allreduce_op: Literal["mean", "sum"] = not_built(
        "mean",
        "Average or add gradients over ranks.",
        nearest="backward(loss, weight=n), which divides a summed loss by the items of all ranks",
    )
    managed_gradient_accumulation: bool = not_built(
        True, "Whether the engine counts micro-steps.", nearest="gradient_accumulation_steps: 1 with no_sync()"
    )
    sparse_gradients: bool = no_effect(
        False, "Reduce embedding gradients as sparse tensors.", reason="they are reduced dense, with equal values"
    )
    disable_allgather: bool = no_effect(False, "Read by nobody.", reason="DeepSpeed reads it nowhere either")
    graph_harvesting: bool = no_effect(False, "Capture short kernels in graphs.", reason="no graphs are captured")


class LogKeys(Section):
    """What is printed and timed."""

    steps_per_print: Annotated[Int, Field(ge=1)] | Infinite | None = honoured(
        None, "Updates between two log lines; null or Infinity: none."
    )
    wall_clock_breakdown: bool = honoured(False, "Time forward, backward and step.")
    memory_breakdown: bool = no_effect(
        False, "Log memory by phase.", reason="the accelerator's memory statistics can be read at any time"
    )
    dump_state: bool = no_effect(
        False, "Print the configuration at the start.", reason="`scale config explain FILE` prints it"
    )
    log_level: str | None = no_effect(
        None, "Level of the package's logger.", reason='logging.getLogger("polyscale").setLevel(...) sets it'
    )


class ModelKeys(Section):
    """What DeepSpeed asks about model, data and host."""

    zero_allow_untested_optimizer: bool = no_effect(
        False, "Accept an unlisted optimizer.", reason="any optimizer works, by the granularity it declares"
    )
    zero_force_ds_cpu_optimizer: bool = no_effect(
        True, "Refuse a foreign optimizer with offload.", reason="nothing is offloaded"
    )
    allgather_size: Int | None = no_effect(
        None, "Bucket size of an older form of stage 1.", reason="zero_optimization has no buckets here"
    )
    vocabulary_size: Int | None = no_effect(
        None, "Warn when it is not a multiple of 8.", reason="it is advice about speed only"
    )
    dataloader_drop_last: bool = no_effect(
        False, "Drop the last, smaller batch.", reason="say it where the loader is made"
    )
    use_data_before_expert_parallelism: bool = no_effect(False, "Order of ranks.", reason=_MOE)
    seq_parallel_communication_data_type: Dtype = no_effect(
        "fp32", "Dtype of collectives of sequence parallelism.", reason="there is no sequence parallelism here"
    )
    sequence_parallel_size: Int | None = not_built(
        None, "Ranks that share one sequence.", nearest="data parallelism (topology.dp_shard, topology.dp_replicate)"
    )
    data_parallel_size: Int | None = not_built(
        None, "Data-parallel ranks of a mesh.", nearest="topology.dp_shard and topology.dp_replicate"
    )
    disable_python_gc: bool = no_effect(
        False, "Turn off cyclic garbage collection.", reason="call gc.disable() in the script"
    )
