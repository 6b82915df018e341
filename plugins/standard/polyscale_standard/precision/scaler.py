"""Loss scalers: state machines over "did this update overflow?".

Notable: the rules are DeepSpeed's documented ones, in terms of updates, not of micro-steps.

- The scale doubles after ``window`` updates in a row without overflow.
- ``hysteresis`` overflows are needed for the first halving; from then on each overflow halves. Patience is refilled by
  a doubling, or, with ``consecutive_hysteresis``, by any update without overflow.
- The scale never falls below ``floor``. A skip at the floor cannot be answered by a smaller scale; ``max_skips`` of
  them in a row mean that the numbers, not the scale, are wrong.

Gradual loss scaling: Micikevicius et al. 2018, "Mixed Precision Training", section 3.2.
"""

from __future__ import annotations

import logging
from typing import Any

from polyscale.errors import CheckpointError, ConfigError

# A scale whose reciprocal is subnormal in fp32 could not be undone exactly.
LARGEST_SCALE = 2.0**126

logger = logging.getLogger("polyscale")


class DynamicLossScaler:
    """A scale that follows overflows."""

    def __init__(
        self,
        *,
        initial: float = 2.0**16,
        window: int = 1000,
        hysteresis: int = 2,
        consecutive_hysteresis: bool = False,
        floor: float = 1.0,
        max_skips: int = 20,
    ) -> None:
        """See the module for the rules.

        Raises:
            ConfigError: a value is out of range, or the initial scale lies below the floor.
        """
        _require(window >= 1, f"fp16.loss_scale_window={window}", "the scale grows after that many updates", "1000")
        _require(hysteresis >= 1, f"fp16.hysteresis={hysteresis}", "it counts overflows before a halving", "2")
        _require(floor > 0, f"fp16.min_loss_scale={floor:g}", "a scale of 0 erases every gradient", "1")
        _require(max_skips >= 1, f"backends.options.fp16.max_skips_at_floor={max_skips}", "it counts skips", "20")
        _require(
            floor <= initial <= LARGEST_SCALE,
            f"initial loss scale {initial:g} with fp16.min_loss_scale={floor:g}",
            f"the start must lie between the floor and {LARGEST_SCALE:g}",
            "fp16.initial_scale_power=16",
        )
        self._scale = float(initial)
        self._window = window
        self._hysteresis = hysteresis
        self._consecutive = consecutive_hysteresis
        self._floor = float(floor)
        self._max_skips = max_skips
        self._good_updates = 0
        self._patience = hysteresis
        self._skips_at_floor = 0

    @property
    def scale(self) -> float:
        """The factor on the loss of the coming micro-steps."""
        return self._scale

    @property
    def exhausted(self) -> bool:
        """Whether ``max_skips`` updates in a row were skipped with the scale at its floor."""
        return self._skips_at_floor >= self._max_skips

    def update(self, overflow: bool) -> None:
        """Take the outcome of one update, agreed by all ranks."""
        if overflow:
            self._after_overflow()
        else:
            self._after_good_update()

    def _after_overflow(self) -> None:
        self._good_updates = 0
        self._skips_at_floor = self._skips_at_floor + 1 if self._scale <= self._floor else 0
        if self._patience > 1:
            self._patience -= 1
        else:
            self._scale = max(self._scale / 2, self._floor)

    def _after_good_update(self) -> None:
        self._good_updates += 1
        self._skips_at_floor = 0
        if self._consecutive:
            self._patience = self._hysteresis
        if self._good_updates == self._window:
            self._good_updates = 0
            self._patience = self._hysteresis
            self._scale = min(self._scale * 2, LARGEST_SCALE)

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers: the scale and where the counts stand."""
        return {
            "dynamic": True,
            "scale": self._scale,
            "good_updates": self._good_updates,
            "patience": self._patience,
            "skips_at_floor": self._skips_at_floor,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore it. State of a static scaler is set aside: the configuration asks for a dynamic one now.

        Raises:
            CheckpointError: an entry is missing.
        """
        if not _same_kind(state, dynamic=True):
            return
        self._scale = max(float(_entry(state, "scale")), self._floor)
        self._good_updates = min(int(_entry(state, "good_updates")), self._window - 1)
        self._patience = min(int(_entry(state, "patience")), self._hysteresis)
        self._skips_at_floor = int(_entry(state, "skips_at_floor"))


class StaticLossScaler:
    """A fixed scale; every overflow is a skip that no smaller scale will answer."""

    def __init__(self, scale: float, *, max_skips: int = 20) -> None:
        """``scale``: the factor.

        Raises:
            ConfigError: it is not positive, or too large for fp32.
        """
        _require(0 < scale <= LARGEST_SCALE, f"fp16.loss_scale={scale:g}", "it must be positive and fit fp32", "0")
        _require(max_skips >= 1, f"backends.options.fp16.max_skips_at_floor={max_skips}", "it counts skips", "20")
        self._scale = float(scale)
        self._max_skips = max_skips
        self._skips = 0

    @property
    def scale(self) -> float:
        """The fixed factor."""
        return self._scale

    @property
    def exhausted(self) -> bool:
        """Whether ``max_skips`` updates in a row were skipped."""
        return self._skips >= self._max_skips

    def update(self, overflow: bool) -> None:
        """Take the outcome of one update, agreed by all ranks."""
        self._skips = self._skips + 1 if overflow else 0

    def state_dict(self) -> dict[str, Any]:
        """The count of skips; the scale is the configuration's."""
        return {"dynamic": False, "skips": self._skips}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore it. State of a dynamic scaler is set aside: the configuration fixes the scale now.

        Raises:
            CheckpointError: an entry is missing.
        """
        if _same_kind(state, dynamic=False):
            self._skips = int(_entry(state, "skips"))


def _same_kind(state: dict[str, Any], *, dynamic: bool) -> bool:
    if bool(_entry(state, "dynamic")) == dynamic:
        return True
    logger.info(
        "The checkpoint's loss scale is set aside: fp16.loss_scale asks for %s scaling now",
        "dynamic" if dynamic else "static",
    )
    return False


def _entry(state: dict[str, Any], key: str) -> Any:
    if key not in state:
        raise CheckpointError(
            f"Loss scaler state with keys {sorted(state)}", why=f"{key!r} is missing", fix="Load a whole checkpoint"
        )
    return state[key]


def _require(ok: bool, given: str, why: str, default: str) -> None:
    if not ok:
        raise ConfigError(given, why=f"Out of range: {why}", fix=f"The default is {default}")
