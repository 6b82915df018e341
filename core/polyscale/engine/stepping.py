"""One update from start to end, and what is told about it."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch

from polyscale.engine.accumulation import Accumulation
from polyscale.engine.intact import Intact
from polyscale.engine.optimizer import take_step
from polyscale.engine.setup import Setup
from polyscale.engine.update import GradientNumbers, GradientScaling
from polyscale.errors import PolyscaleError
from polyscale.interfaces.observer import StepTaken

log = logging.getLogger("polyscale")

MAX_SKIPS = 20
"""Updates skipped in a row, without a loss scale that could fall, after which training cannot go on."""


@dataclass(frozen=True)
class Outcome:
    """What an update did.

    Attributes:
        numbers: norm, clipping, overflow.
        skipped: whether nothing was updated, because of an overflow.
        loss: mean loss of its micro-steps, a 0-dim tensor, or None.
        micro_steps: how many it took.
        rates: learning rates it used.
        loss_scale: the factor on its losses.
    """

    numbers: GradientNumbers
    skipped: bool
    loss: Any
    micro_steps: int
    rates: tuple[float, ...]
    loss_scale: float


class Stepper:
    """Turns the gradients of an accumulation into an update. All calls are collective.

    Attributes:
        torn: whether an update was interrupted in the middle, so that weights and optimizer states do not belong
            together. A load mends it.
    """

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._store = setup.applied.store
        self._gradients = setup.applied.gradients
        self._scaling = GradientScaling(self._store, setup.topology, setup.communication, setup.accelerator)
        self._skips_in_a_row = 0
        self._updating = False
        self.torn = False

    @property
    def loss_scale(self) -> float:
        """The factor on the loss (fp16); 1.0 elsewhere."""
        return 1.0 if self._setup.scaler is None else self._setup.scaler.scale

    def rates(self) -> tuple[float, ...]:
        """Learning rate of each group."""
        groups = self._setup.optimizer.param_groups if self._setup.optimizer is not None else []
        return tuple(float(group["lr"]) for group in groups if "lr" in group)

    def reduce(self, accumulation: Accumulation) -> None:
        """Reduce what has been accumulated, so that gradients can be read before the update."""
        if accumulation.open and not self._updating:
            self._gradients.finish(accumulation.signature)

    def update(self, accumulation: Accumulation) -> Outcome:
        """Update with what has been accumulated, and start a new accumulation.

        Raises:
            PolyscaleError: updates are skipped without end (names the first parameter that is not finite).
        """
        setup = self._setup
        assert setup.optimizer is not None
        self._store.refuse_unfrozen()
        self._gradients.finish(accumulation.signature)
        self._updating = True
        try:
            numbers = self._scaling.apply(
                micro_steps=accumulation.done,
                weight=accumulation.weight,
                loss_scale=self.loss_scale,
                predivisor=self._gradients.divisor,
                max_norm=float(setup.config.gradient_clipping),
                check=setup.check_overflow,
            )
            skipped = bool(numbers.overflow)
            culprit = self._scaling.first_non_finite() if skipped else None
            outcome = Outcome(
                numbers, skipped, accumulation.mean_loss(), accumulation.done, self.rates(), self.loss_scale
            )
            if not skipped:
                self._write(setup.optimizer)
        finally:
            self._updating = False
        self._gradients.clear()
        accumulation.reset()
        self._follow(skipped, culprit)
        return outcome

    def _write(self, optimizer: torch.optim.Optimizer) -> None:
        """Take the optimizer's step: whole, or not at all, or known to be torn."""
        before = Intact(optimizer)
        self.torn = True
        try:
            take_step(optimizer, self._store.granularity)
        except BaseException as error:
            self.torn = not before.restore(error)
            raise
        self._store.written()
        self.torn = False

    def _follow(self, skipped: bool, culprit: str | None) -> None:
        """Move loss scale and schedule."""
        setup = self._setup
        self._skips_in_a_row = self._skips_in_a_row + 1 if skipped else 0
        if setup.scaler is not None:
            setup.scaler.update(skipped)
        if not skipped:
            if setup.lr_scheduler is not None:
                setup.lr_scheduler.step()
            return
        hopeless = self._skips_in_a_row >= MAX_SKIPS if setup.scaler is None else setup.scaler.exhausted
        if hopeless:
            raise self._hopeless(culprit)

    def _hopeless(self, culprit: str | None) -> PolyscaleError:
        found = self._setup.control.share("non-finite", culprit, what="first non-finite parameter")
        first = next((name for name in found if name is not None), "none that a rank can name")
        where = "" if self._setup.scaler is None else f", with the loss scale at its floor ({self.loss_scale:g})"
        return PolyscaleError(
            f"{self._skips_in_a_row} updates in a row were skipped{where}",
            why=f"gradients are not finite; the first such parameter is {first}",
            fix="Lower the learning rate, clip gradients, or look for the layer that overflows",
        )


def tell_step(setup: Setup, event: StepTaken) -> None:
    """Hand an event to the observers, and log it when ``steps_per_print`` says so."""
    if is_printed(setup, event.step):
        log.info("%s", describe_step(event))
    setup.observers.tell(event)


def is_printed(setup: Setup, count: int) -> bool:
    """Whether the update number ``count`` is logged, by rank 0."""
    every = setup.config.steps_per_print
    return setup.topology.rank == 0 and every is not None and count % every == 0


def describe_step(event: StepTaken) -> str:
    """One line about an update."""
    loss = "" if event.loss is None else f" loss {event.loss:.4f}"
    rates = ", ".join(f"{rate:.3g}" for rate in event.lr)
    norm = "" if event.grad_norm is None else f" norm {event.grad_norm:.3g}"
    parts = "".join(f" {name} {seconds * 1e3:.0f} ms" for name, seconds in event.seconds.items())
    skipped = f" skipped (loss scale {event.loss_scale:g})" if event.skipped else ""
    return f"step {event.step} samples {event.samples}{loss} lr {rates}{norm}{parts}{skipped}"
