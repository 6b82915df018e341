"""Make the scheduler that a configuration names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from polyscale.errors import ConfigError
from polyscale.schedules import torch_schedules
from polyscale.schedules.closed_form import ClosedFormLR, momentum_is_cycled
from polyscale.schedules.parameters import SCHEDULES, checked

if TYPE_CHECKING:
    from polyscale.config import SchedulerSection


def build(optimizer: Optimizer, section: SchedulerSection) -> LRScheduler:
    """See :func:`polyscale.schedules.build_scheduler`."""
    if section.type not in SCHEDULES:
        return torch_schedules.build(optimizer, section)
    params = checked(section.type, section.params)
    groups = len(optimizer.param_groups)
    for key, value in params.items():
        if isinstance(value, tuple) and len(value) != groups:
            raise ConfigError(
                f"scheduler.params.{key} = {list(value)!r}",
                why=f"it has {len(value)} values, and the optimizer has {groups} groups",
                fix="Give one number, or one for each group in order",
            )
    cycled = momentum_is_cycled(optimizer, params, asked="cycle_momentum" in section.params)
    return ClosedFormLR(optimizer, name=section.type, params=params, cycled=cycled)
