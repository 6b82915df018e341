"""Observer: receives events. Frozen dataclasses; one that raises is disabled and reported once."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable


@dataclass(frozen=True)
class EngineStarted:
    """An engine was made: world, stage, dtypes, number of parameters."""

    world_size: int
    rank: int
    data_parallel: str
    stage: int
    parameters: int
    dtypes: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class StepTaken:
    """An update was done, or skipped because of an overflow.

    Attributes:
        step: updates done so far.
        samples: samples seen so far by all ranks.
        loss: mean loss of the micro-steps of this rank, or None where ``backward`` was given none.
        lr: learning rate of each group, as used by this update.
        grad_norm: norm before clipping, or None when it was not computed.
        seconds: time by part ("forward", "backward", "step"), when ``wall_clock_breakdown`` is on.
    """

    step: int
    samples: int
    loss: float | None
    lr: tuple[float, ...]
    grad_norm: float | None = None
    clip_factor: float = 1.0
    loss_scale: float = 1.0
    skipped: bool = False
    seconds: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class CheckpointSaved:
    """A checkpoint was written."""

    path: str
    step: int
    seconds: float


@dataclass(frozen=True)
class EngineClosed:
    """The engine was closed."""

    step: int


Event = EngineStarted | StepTaken | CheckpointSaved | EngineClosed


@runtime_checkable
class Observer(Protocol):
    """Receives every event on rank 0."""

    name: str

    def enabled(self) -> bool:
        """Whether the configuration asks for it."""

    def on_event(self, event: Event) -> None:
        """Take one event; must not keep the caller waiting long."""

    def close(self) -> None:
        """Flush and free."""
