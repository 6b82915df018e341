"""Ranks agree on configuration and model before their first collective, through the store.

A difference is an error on every rank that names both values; it can never become a hang or a mismatch of sizes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from polyscale.control.agreement import Control
from polyscale.engine.accumulation import Accumulation
from polyscale.errors import RankError
from polyscale.parameters.fingerprint import Fingerprint, fingerprint, first_difference

if TYPE_CHECKING:
    from polyscale.config import Config


def agree(control: Control, config: Config, model: nn.Module) -> None:
    """Check that all ranks were started with one configuration and one model.

    Raises:
        RankError: on every rank, with the first key or parameter that differs.
    """
    if control.world_size == 1:
        return
    _agree_on_configuration(control, config)
    own = fingerprint(model)
    if len(set(control.share("model", own.digest, what="model fingerprint"))) == 1:
        return
    found = [Fingerprint.from_json(text) for text in control.share("model-detail", own.to_json(), what="model")]
    other = next(rank for rank, entry in enumerate(found) if entry.digest != found[0].digest)
    raise RankError(
        f"Ranks were started with different models: rank 0 and rank {other} differ",
        why=first_difference(found[0], found[other]) or "their digests differ",
        fix="Build the same model on every rank",
    )


def agree_on_flush(control: Control, accumulation: Accumulation) -> None:
    """Check that all ranks flush the same number of micro-steps, before any of them sends a gradient.

    Raises:
        RankError: they do not, or a rank does not flush.
    """
    state = {"micro-steps": accumulation.done, "open": accumulation.backwards > 0}
    control.agree("flush", state, what="flush of an accumulation")


def agree_on_optimizer(control: Control, optimizer: torch.optim.Optimizer | None) -> None:
    """Check that all ranks update with one class and one set of hyper-parameters.

    Raises:
        RankError: they do not.
    """
    if optimizer is None:
        control.agree("optimizer", None, what="optimizer")
        return
    groups = [
        {key: repr(value) for key, value in group.items() if key != "params"} | {"parameters": len(group["params"])}
        for group in optimizer.param_groups
    ]
    values = {f"group {index}": group for index, group in enumerate(groups)}
    control.agree("optimizer", {"class": type(optimizer).__name__, **values}, what="optimizer")


def _agree_on_configuration(control: Control, config: Config) -> None:
    """Compare what must be equal on all ranks; keys that only print may differ."""
    if len(set(control.share("configuration", config.digest(), what="configuration"))) == 1:
        return
    from polyscale.config.compare import differences

    found = control.share("configuration-detail", config.as_dict(), what="configuration")
    for rank, other in enumerate(found):
        differing = differences(found[0], other)
        if differing:
            path, one, two = differing[0]
            more = f" (and {len(differing) - 1} more)" if len(differing) > 1 else ""
            raise RankError(
                f"Ranks were started with different configurations: {path}{more}",
                why=f"rank 0 has {one!r}, rank {rank} has {two!r}",
                fix="Give every rank the same configuration",
            )
