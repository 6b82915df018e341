"""A first configuration for a stage, to be edited: what ``scale config init --stage N`` prints."""

from __future__ import annotations

from typing import Any

from polyscale.config.errors import WrongValueError


def init(stage: int = 2) -> dict[str, Any]:
    """Return a configuration that ``load_config`` takes as it is.

    Args:
        stage: of ZeRO, 0 to 3.

    Raises:
        WrongValueError: there is no such stage.
    """
    if isinstance(stage, bool) or not isinstance(stage, int) or not 0 <= stage <= 3:
        raise WrongValueError(f"stage {stage!r}", why="expected 0, 1, 2 or 3", fix="0 shards nothing, 3 everything")
    return {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "seed": 0,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.9, 0.95], "weight_decay": 0.1}},
        "scheduler": {"type": "WarmupCosineLR", "params": {"warmup_num_steps": 100, "total_num_steps": 1000}},
        "bf16": {"enabled": False},
        "zero_optimization": {"stage": stage},
        "backends": {"accelerator": "auto", "data_parallel": "auto"},
        "topology": {"dp_replicate": 1, "dp_shard": -1},
        "steps_per_print": 10,
    }
