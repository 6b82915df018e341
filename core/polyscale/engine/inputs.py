"""What goes into an engine beside the model: schedule, data, random numbers."""

from __future__ import annotations

import hashlib
import logging
from typing import TYPE_CHECKING, Any

import torch

from polyscale.control.agreement import Control
from polyscale.errors import PolyscaleError
from polyscale.interfaces.accelerator import Accelerator
from polyscale.topology import Topology

if TYPE_CHECKING:
    from polyscale.config import Config

log = logging.getLogger("polyscale")


def build_schedule(given: Any, config: Config, optimizer: torch.optim.Optimizer | None) -> Any:
    """Return the given schedule, the one a callable makes, or the configured one; None when there is none."""
    if optimizer is None:
        if given is not None:
            raise PolyscaleError(
                "An lr_scheduler without an optimizer",
                why="there is no learning rate to schedule",
                fix="Add 'optimizer' to the configuration, or pass one to polyscale.initialize",
            )
        return None
    if given is None:
        if config.scheduler is None:
            return None
        from polyscale.schedules import build_scheduler

        return build_scheduler(optimizer, config.scheduler)
    is_schedule = isinstance(given, torch.optim.lr_scheduler.LRScheduler)
    schedule = given(optimizer) if callable(given) and not is_schedule else given
    check_schedule(schedule, optimizer)
    return schedule


def check_schedule(schedule: Any, optimizer: torch.optim.Optimizer) -> None:
    """Check that a schedule can be stepped after every update.

    Raises:
        PolyscaleError: it needs a metric, is none, or is of another optimizer.
    """
    name = type(schedule).__name__
    if isinstance(schedule, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise PolyscaleError(
            "lr_scheduler = ReduceLROnPlateau",
            why="its step() needs a metric, which the engine does not know",
            fix="Leave lr_scheduler out, call its step(metric) yourself over engine.optimizer, and engine.track it",
        )
    if not all(callable(getattr(schedule, method, None)) for method in ("step", "state_dict", "load_state_dict")):
        raise PolyscaleError(
            f"lr_scheduler = {name}",
            why="a schedule has step(), state_dict() and load_state_dict()",
            fix="Pass one of torch.optim.lr_scheduler, or a callable of the optimizer that makes one",
        )
    if getattr(schedule, "optimizer", optimizer) is not optimizer:
        raise PolyscaleError(
            f"An lr_scheduler ({name}) of another optimizer",
            why="it would change the learning rate of groups that are not trained",
            fix="Pass the optimizer it was made with as optimizer=, or a callable of the optimizer",
        )


def build_loader(data: Any, config: Config, topology: Topology, micro_batch: int, control: Control) -> Any:
    """Make a resumable loader of a dataset; take another iterable as it is."""
    is_loader = isinstance(data, torch.utils.data.DataLoader) or hasattr(data, "state_dict")
    is_dataset = hasattr(data, "__getitem__") and hasattr(data, "__len__")
    if isinstance(data, torch.utils.data.DataLoader):
        _look_at(data, topology, micro_batch)
    if data is None or is_loader:
        return data
    if not is_dataset and not hasattr(data, "__iter__"):
        raise PolyscaleError(
            f"data = {data!r:.80}",
            why=f"{type(data).__name__} is neither a dataset nor iterable",
            fix="Pass a dataset (with __getitem__ and __len__), a DataLoader, or an iterable of micro-batches",
        )
    if not is_dataset:
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


def _look_at(data: Any, topology: Topology, micro_batch: int) -> None:
    """Warn of what makes a torch DataLoader train something else than was meant."""
    sampler = getattr(data, "batch_sampler", None) or data.sampler
    splits = any(hasattr(part, "num_replicas") for part in (sampler, getattr(sampler, "sampler", None), data.sampler))
    iterable = isinstance(data.dataset, torch.utils.data.IterableDataset)
    if topology.dp_size > 1 and not splits and not iterable:
        log.warning(
            "data is a DataLoader without a DistributedSampler: all %d ranks see the same samples. Pass the dataset "
            "itself, or a sampler with num_replicas=%d and rank=engine.topology.dp_rank",
            topology.dp_size,
            topology.dp_size,
        )
    if data.batch_size is not None and data.batch_size != micro_batch:
        log.warning(
            "data is a DataLoader of batch_size %d, train_micro_batch_size_per_gpu is %d: samples are counted wrong",
            data.batch_size,
            micro_batch,
        )


def seed_ranks(seed: int, topology: Topology, accelerator: Accelerator) -> None:
    """Seed host and device generators: different on ranks with different samples, equal across tensor parallelism."""
    text = f"polyscale:{seed}:{topology.dp_rank}:{topology.coordinate('pp')}"
    own = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")
    torch.manual_seed(own)
    accelerator.manual_seed(own)
