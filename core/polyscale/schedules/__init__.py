"""Learning-rate schedules: DeepSpeed's five as closed forms of the update, and any of torch's by name.

Notable: update k (from 0) uses the schedule's value at k, once each. The formulas (``formulas``) are pure functions of
k; ``closed_form`` puts them behind torch's ``LRScheduler``. torch is imported when a scheduler is built.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

    from polyscale.config import SchedulerSection

__all__ = ["build_scheduler", "check_scheduler"]


def build_scheduler(optimizer: Optimizer, section: SchedulerSection) -> LRScheduler:
    """Make the scheduler that ``section`` names, over ``optimizer``; it sets the values of update 0 at once.

    Raises:
        ConfigError: an unknown name (with the nearest), a missing or unknown parameter, a value out of range.
    """
    from polyscale.schedules.build import build

    return build(optimizer, section)


def check_scheduler(section: SchedulerSection, *, unresolved: Collection[str] = ()) -> None:
    """Check name and parameters before there is an optimizer. Imports torch only for names that are torch's.

    Args:
        section: name and parameters.
        unresolved: parameters that will be given later: they are not missing.

    Raises:
        ConfigError: as ``build_scheduler``; ``SeveralConfigErrors`` when it is more than one thing.
    """
    from polyscale.schedules.parameters import SCHEDULES, checked

    if section.type in SCHEDULES:
        checked(section.type, section.params, unresolved=unresolved)
        return
    from polyscale.schedules.torch_schedules import check

    check(section, unresolved=unresolved)
