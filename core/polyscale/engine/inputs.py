"""What goes into an engine beside the model: schedule, data, random numbers."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from polyscale.config import Config
from polyscale.control.agreement import Control
from polyscale.errors import PolyscaleError
from polyscale.interfaces.accelerator import Accelerator
from polyscale.topology import Topology


def build_schedule(given: Any, config: Config, optimizer: torch.optim.Optimizer | None) -> Any:
    """Return the given schedule, the one a callable makes, or the configured one; None when there is none."""
    if optimizer is None:
        return None
    if given is None:
        if config.scheduler is None:
            return None
        from polyscale.schedules import build_scheduler

        return build_scheduler(optimizer, config.scheduler)
    if isinstance(given, torch.optim.lr_scheduler.LRScheduler):
        if given.optimizer is not optimizer:
            raise PolyscaleError(
                "An lr_scheduler of another optimizer",
                why="it would change the learning rate of groups that are not trained",
                fix="Pass the optimizer it was made with as optimizer=, or a callable of the optimizer",
            )
        return given
    return given(optimizer) if callable(given) else given


def build_loader(data: Any, config: Config, topology: Topology, micro_batch: int, control: Control) -> Any:
    """Make a resumable loader of a dataset; take another iterable as it is."""
    is_loader = isinstance(data, torch.utils.data.DataLoader) or hasattr(data, "state_dict")
    is_dataset = hasattr(data, "__getitem__") and hasattr(data, "__len__")
    if data is None or is_loader or not is_dataset:
        return data
    from polyscale.data import loader

    control.agree("data", len(data), what="number of samples")
    return loader(
        data,
        topology=topology,
        micro_batch_size=micro_batch,
        seed=config.seed or 0,
        drop_last=True,
    )


def seed_ranks(seed: int, topology: Topology, accelerator: Accelerator) -> None:
    """Seed host and device generators: different on ranks with different samples, equal across tensor parallelism."""
    text = f"polyscale:{seed}:{topology.dp_rank}:{topology.coordinate('pp')}"
    own = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")
    torch.manual_seed(own)
    accelerator.manual_seed(own)
