"""``backends`` and ``topology``: what polyscale adds to DeepSpeed's vocabulary."""

from __future__ import annotations

from typing import Any

from polyscale.config.section import NEW, Int, Section, honoured


class BackendsSection(Section):
    """Which plugin of each kind; "auto" lets polyscale choose."""

    accelerator: str = honoured(
        "auto", "Accelerator plugin; auto: the one that is available, else cpu.", deepspeed=NEW, min_length=1
    )
    communication: str = honoured(
        "auto", "Communication plugin; auto: the one the accelerator prefers.", deepspeed=NEW, min_length=1
    )
    data_parallel: str = honoured(
        "auto",
        "Data-parallel plugin; auto: ddp at stage 0, else zero where installed, else fsdp2.",
        deepspeed=NEW,
        min_length=1,
    )
    precision: str = honoured(
        "auto", "Precision plugin; auto: from the fp16 and bf16 sections, else fp32.", deepspeed=NEW, min_length=1
    )
    io: str = honoured("auto", "I/O plugin; auto: threads.", deepspeed=NEW, min_length=1)
    checkpoint: str = honoured("auto", "Checkpoint plugin; auto: dcp.", deepspeed=NEW, min_length=1)
    options: dict[str, dict[str, Any]] = honoured(
        {}, "Options of each plugin by its name.", deepspeed=NEW, takes_auto=True
    )


class TopologySection(Section):
    """How the data-parallel ranks are laid out."""

    dp_replicate: Int = honoured(
        1, "Replicas: groups of dp_shard ranks that hold the same shards (HSDP).", deepspeed=NEW, ge=1
    )
    dp_shard: Int = honoured(
        -1, "Ranks over which state is sharded; -1 fills up what dp_replicate leaves.", deepspeed=NEW, ge=-1
    )
