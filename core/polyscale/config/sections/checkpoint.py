"""``checkpoint``: how ``save`` and ``load`` behave. The format is DCP's, whatever these say."""

from __future__ import annotations

from typing import Any, Literal

from polyscale.config.section import Section, no_effect, not_built


class ParallelWriteSection(Section):
    """Which ranks write."""

    pipeline_stage: bool = no_effect(
        False, "Ranks of a pipeline stage write together.", reason="every rank always writes what it holds"
    )


class CheckpointSection(Section):
    """Saving and loading."""

    tag_validation: Literal["Warn", "Ignore", "Fail", "WARN", "IGNORE", "FAIL", "warn", "ignore", "fail"] = no_effect(
        "Warn",
        "What to do when ranks give different tags to save.",
        reason="ranks that give different tags are always an error",
    )
    load_universal: bool = no_effect(
        False,
        "Load a universal checkpoint.",
        reason="every checkpoint of polyscale loads at any world size and stage",
    )
    use_node_local_storage: bool = not_built(
        False, "Save each host's part on its own disk.", nearest="a folder that all hosts see"
    )
    parallel_write: ParallelWriteSection = no_effect(
        ParallelWriteSection, "Which ranks write.", reason="every rank always writes what it holds"
    )
    checkpoint_serialization: bool = no_effect(
        True, "Write torch's zip format.", reason="tensors are written in the format of torch.distributed.checkpoint"
    )
    writer: dict[str, Any] | None = no_effect(
        None, "DeepSpeed's writer and its buffers.", reason="the plugin of backends.checkpoint writes"
    )
