"""torch's ``LRScheduler`` over a closed form: the value of update k depends on k alone, never on the value before.

Notable: the state is the update and the groups' own learning rates, plain numbers that any checkpoint holds; loading it
sets the values of that update in the optimizer at once, so stopping and resuming equals going on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from polyscale.errors import CheckpointError, ConfigError
from polyscale.schedules.curves import CURVES, momentum


class ClosedFormLR(LRScheduler):
    """One of the five schedules.

    Attributes:
        last_epoch: the update whose values the optimizer has now, from 0 (torch's name).
        base_lrs: the groups' learning rates when the scheduler was made.
    """

    def __init__(self, optimizer: Optimizer, *, name: str, params: Mapping[str, Any], cycled: bool) -> None:
        """Set the values of the first update.

        Args:
            optimizer: its groups are changed in place.
            name: of the schedule.
            params: checked, complete.
            cycled: whether momentum follows the schedule, where it has a curve for it.
        """
        self._name = name
        self._params = dict(params)
        self._cycled = cycled
        start = params["last_batch_iteration"]
        for group in optimizer.param_groups:
            group.setdefault("initial_lr", group["lr"])
        super().__init__(optimizer, last_epoch=start)

    def get_lr(self) -> list[Any]:
        """Return the learning rate of each group at update ``last_epoch``."""
        curve = CURVES[self._name]
        return [curve(self.last_epoch, self._params, index, float(base)) for index, base in enumerate(self.base_lrs)]

    def step(self, epoch: int | None = None) -> None:
        """Go to the next update: call it once after each update of the optimizer."""
        super().step(epoch)
        self._set_momentum()

    def state_dict(self) -> dict[str, Any]:
        """Return plain numbers."""
        return {
            "schedule": self._name,
            "last_epoch": self.last_epoch,
            "base_lrs": [float(base) for base in self.base_lrs],
            "_step_count": self._step_count,
            "_last_lr": [float(lr) for lr in self.get_last_lr()],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go to the update of a state; the parameters of the schedule stay those of the configuration.

        Raises:
            CheckpointError: the state is of another schedule, or of another number of groups.
        """
        if state_dict.get("schedule") != self._name:
            raise CheckpointError(
                f"The state of scheduler {state_dict.get('schedule')!r}",
                why=f"the configuration asks for {self._name}",
                fix="Set scheduler.type to that of the checkpoint",
            )
        if len(state_dict["base_lrs"]) != len(self.optimizer.param_groups):
            raise CheckpointError(
                f"A scheduler state of {len(state_dict['base_lrs'])} groups",
                why=f"the optimizer has {len(self.optimizer.param_groups)}",
            )
        self.last_epoch = int(state_dict["last_epoch"])
        self.base_lrs = list(state_dict["base_lrs"])
        self._step_count = int(state_dict["_step_count"])
        for group, lr in zip(self.optimizer.param_groups, self.get_lr(), strict=True):
            _set(group, "lr", lr)
        self._last_lr = [group["lr"] for group in self.optimizer.param_groups]
        self._set_momentum()

    def _set_momentum(self) -> None:
        value = momentum(self._name, self.last_epoch, self._params) if self._cycled else None
        if value is None:
            return
        for group in self.optimizer.param_groups:
            if "betas" in group:
                group["betas"] = (value, *group["betas"][1:])
            elif "momentum" in group:
                group["momentum"] = value


def _set(group: dict[str, Any], key: str, value: float) -> None:
    """Set a hyper-parameter; one that is a tensor keeps its memory, which a captured graph may read."""
    if hasattr(group[key], "fill_"):
        group[key].fill_(value)
    else:
        group[key] = value


def momentum_is_cycled(optimizer: Optimizer, params: Mapping[str, Any], *, asked: bool) -> bool:
    """Whether OneCycle moves the optimizer's momentum: only one that is there and not 0.

    Raises:
        ConfigError: the configuration asks for it, and the optimizer has none.
    """
    if not params.get("cycle_momentum", False):
        return False
    has = all("betas" in group or group.get("momentum", 0) for group in optimizer.param_groups)
    if not has and asked:
        raise ConfigError(
            "scheduler.params.cycle_momentum = True",
            why=f"{type(optimizer).__name__} has neither betas nor a momentum other than 0 in every group",
            fix="Set cycle_momentum to false, or give the optimizer a momentum",
        )
    return has
