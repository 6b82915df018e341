"""What cannot be true together, and what has another place: checked on the whole, before anything is allocated."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from polyscale.config.batch import ACCUMULATION, MICRO, TRAIN
from polyscale.config.errors import BatchError, NotBuiltError, WrongValueError, each
from polyscale.errors import ConfigError, PolyscaleError
from polyscale.schedules import check_scheduler

if TYPE_CHECKING:
    from polyscale.config.config import Config

UNBUILT_OPTIMIZERS: Mapping[str, str] = {
    "onebitadam": "adam",
    "zerooneadam": "adam",
    "onebitlamb": "lamb",
    "muadam": "adam",
    "muadamw": "adamw",
    "musgd": "sgd",
}
"""DeepSpeed's optimizers that no plugin here provides -> the nearest that one does."""


def contradictions(config: Config, set_keys: Mapping[str, Any], unresolved: frozenset[str]) -> list[PolyscaleError]:
    """Return what is wrong with values that are each fine by themselves.

    Args:
        config: the values.
        set_keys: what the user wrote, to tell a default from a wish.
        unresolved: paths whose "auto" nothing could tell: they are neither missing nor at their default.
    """
    return [
        *_precision(config, set_keys),
        *_optimizer(config),
        *_scheduler(config, unresolved),
        *_batch(config),
        *_sections(config),
    ]


def _precision(config: Config, set_keys: Mapping[str, Any]) -> Iterator[ConfigError]:
    if config.fp16.enabled and config.bf16.enabled:
        yield WrongValueError(
            "fp16.enabled true, bf16.enabled true",
            why="a model computes in one of them",
            fix="Turn one off; bf16 needs no loss scaling",
        )
        return
    chosen = config.backends.precision
    for name in ("fp16", "bf16"):
        section = set_keys.get(name)
        wish = section.get("enabled") if isinstance(section, Mapping) else None
        if (wish is True and chosen not in ("auto", name)) or (wish is False and chosen == name):
            yield WrongValueError(
                f"backends.precision {chosen!r}, {name}.enabled {str(wish).lower()}",
                why="they contradict one another",
                fix=f"Leave out {name}.enabled or backends.precision",
            )


def _optimizer(config: Config) -> Iterator[ConfigError]:
    optimizer = config.optimizer
    if optimizer is None:
        return
    places = {"optimizer.params": optimizer.params}
    places.update({f"optimizer.groups[{i}].params": group.params for i, group in enumerate(optimizer.groups)})
    for path, params in places.items():
        if params.get("max_grad_norm"):  # 0 clips nothing, and is left to the optimizer
            yield WrongValueError(
                f"{path}.max_grad_norm = {params['max_grad_norm']!r}",
                why="clipping is done by the engine, over all parameters",
                fix=f"Write gradient_clipping: {params['max_grad_norm']!r} at the top level",
            )
    name = optimizer.type.lower()
    if name in UNBUILT_OPTIMIZERS and name not in {entry.name for entry in entry_points(group="polyscale.optimizer")}:
        yield NotBuiltError(
            f"optimizer.type = {optimizer.type!r}",
            why="it is known, and no installed plugin provides it",
            fix=f"The nearest that works: {UNBUILT_OPTIMIZERS[name]!r}",
        )


def _scheduler(config: Config, unresolved: frozenset[str]) -> Iterator[PolyscaleError]:
    if config.scheduler is None:
        return
    prefix = "scheduler.params."
    unknown = frozenset(path.removeprefix(prefix) for path in unresolved if path.startswith(prefix))
    try:
        check_scheduler(config.scheduler, unresolved=unknown)
    except ConfigError as error:
        yield from each(error)


def scheduler_alone(config: Config) -> ConfigError | None:
    """Return the error for a schedule without an optimizer; only who passes one to ``initialize`` may do so."""
    if config.scheduler is None or config.optimizer is not None:
        return None
    return WrongValueError(
        f"scheduler.type = {config.scheduler.type!r} without an optimizer",
        why="there is no learning rate to schedule",
        fix="Add 'optimizer' to the configuration, or pass one to polyscale.initialize "
        "(`scale config check --own-optimizer` checks for that)",
    )


def _batch(config: Config) -> Iterator[ConfigError]:
    train, micro = config.train_batch_size, config.train_micro_batch_size_per_gpu
    accumulation = config.gradient_accumulation_steps
    portion = (micro or 1) * (accumulation or 1)
    if train is not None and train % portion:
        parts = [f"{MICRO} {micro}"] * (micro is not None) + [f"{ACCUMULATION} {accumulation}"] * (
            accumulation is not None
        )
        nearest = max(1, round(train / portion)) * portion
        yield BatchError(
            f"{TRAIN} {train}, {', '.join(parts)}",
            why=f"{train} is no multiple of {portion}, so no number of data-parallel ranks makes it right",
            fix=f"Nearest that multiplies: {TRAIN} {nearest}, on {nearest // portion} ranks",
        )


def _sections(config: Config) -> Iterator[ConfigError]:
    if config.topology.dp_shard == 0:
        yield WrongValueError(
            "topology.dp_shard = 0", why="expected at least 1, or -1", fix="-1 fills up what dp_replicate leaves"
        )
    patterns = config.data_types.keep_in_fp32_modules
    if isinstance(patterns, list) and "" in patterns:
        yield WrongValueError("data_types.keep_in_fp32_modules holds ''", why="an empty pattern matches no name")
