"""``optimizer`` and ``scheduler``.

Notable: hyper-parameters are the plugin's business (it checks them); what is checked here is what DeepSpeed's users
bring along and what has another place or no meaning in polyscale.
"""

from __future__ import annotations

from typing import Any

from polyscale.config.section import NEW, Section, honoured, no_effect


class OptimizerGroupSection(Section):
    """Parameters that share hyper-parameters of their own."""

    match: list[str] = honoured(
        ..., "Patterns (fnmatch) of parameter names; the first group that matches takes it.", min_length=1
    )
    params: dict[str, Any] = honoured({}, "Hyper-parameters of the group, which win over the optimizer's.")


class OptimizerSection(Section):
    """Which optimizer, with which hyper-parameters."""

    type: str = honoured(..., "Name of an optimizer plugin, or of a class of torch.optim.", min_length=1)
    params: dict[str, Any] = honoured({}, "Hyper-parameters: lr, betas, weight_decay, ...")
    groups: list[OptimizerGroupSection] = honoured(
        [], "Groups by parameter name; what matches none has the optimizer's own hyper-parameters.", deepspeed=NEW
    )
    skip_decay_for_norms_and_biases: bool = honoured(
        False, "No weight decay for parameters of one dimension and biases.", deepspeed=NEW
    )
    legacy_fusion: bool = no_effect(
        False, "Use the older fused kernels.", reason="the fused kernels of torch are used wherever it has them"
    )


class SchedulerSection(Section):
    """Which learning-rate schedule, with which parameters."""

    type: str = honoured(
        ...,
        "LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR, or a class of torch.optim.lr_scheduler.",
        min_length=1,
    )
    params: dict[str, Any] = honoured({}, "Parameters of the schedule.")
