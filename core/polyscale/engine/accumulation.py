"""What a micro-step is, and by what gradients are divided.

What lies between two ``step()`` calls is a micro-step; it may hold any number of backwards, which add. Without weights
the divisor is micro-steps x data-parallel ranks; with weights it is the sum of weights over backwards, micro-steps and
ranks, which makes a mean over items right when ranks have different numbers of them.
"""

from __future__ import annotations

from typing import Any

from polyscale.errors import PolyscaleError


class Accumulation:
    """Counts the micro-steps of one accumulation.

    Attributes:
        wanted: micro-steps per update.
        done: micro-steps ended by ``step()`` since the last update.
        backwards: backwards in the micro-step that is open.
    """

    def __init__(self, wanted: int) -> None:
        self.wanted = wanted
        self.done = 0
        self.backwards = 0
        self.weight: float | None = None
        self.losses: list[Any] = []
        self._weighted: bool | None = None

    @property
    def last(self) -> bool:
        """Whether the open micro-step is the last before an update."""
        return self.done + 1 >= self.wanted

    @property
    def signature(self) -> tuple[int, ...]:
        """What must be equal on all ranks when gradients are reduced: micro-steps, and whether weights were given."""
        return self.done, int(bool(self._weighted))

    @property
    def open(self) -> bool:
        """Whether gradients wait for an update."""
        return self.done > 0 or self.backwards > 0

    def add_backward(self, loss: Any, weight: float | None) -> None:
        """Count a backward, before it runs.

        Raises:
            PolyscaleError: weighted and unweighted backwards are mixed, or the weight is negative.
        """
        if weight is not None and not weight >= 0:
            raise PolyscaleError(
                f"backward(loss, weight={weight!r})",
                why="a weight counts the items that the loss sums over",
                fix="Give a number of items, 0 or more",
            )
        if self._weighted is not None and self._weighted != (weight is not None):
            raise PolyscaleError(
                "backward with a weight and backward without one in the same accumulation",
                why="the divisor would be undefined",
                fix="Give every backward of an accumulation a weight, or none",
            )
        self._weighted = weight is not None
        if weight is not None:
            self.weight = (self.weight or 0.0) + float(weight)
        self.backwards += 1
        self.losses.append(loss.detach())

    def end_micro_step(self) -> None:
        """Count the end of a micro-step.

        Raises:
            PolyscaleError: nothing was done in it.
        """
        if self.backwards == 0:
            raise PolyscaleError(
                "step() without a backward since the last step()",
                why="the micro-step is empty, and other ranks may wait for its gradients",
                fix="Call engine.backward(loss) before engine.step()",
            )
        self.done += 1
        self.backwards = 0

    def mean_loss(self) -> Any:
        """Mean of the losses (of the sums over weights, where weights were given), or None."""
        if not self.losses:
            return None
        total = sum(self.losses[1:], self.losses[0])
        return total / self.weight if self.weight else total / len(self.losses)

    def reset(self) -> None:
        """Start anew."""
        self.done = self.backwards = 0
        self.weight = self._weighted = None
        self.losses = []

    def require_closed(self, doing: str) -> None:
        """Raise when gradients wait for an update.

        Raises:
            PolyscaleError: with both counts.
        """
        if self.open:
            raise self.open_error(doing)

    def open_error(self, doing: str) -> PolyscaleError:
        """The error for ``doing`` something that would lose gradients."""
        done = self.done + (1 if self.backwards else 0)
        return PolyscaleError(
            f"{doing} after {done} of {self.wanted} micro-steps of an accumulation",
            why="the gradients accumulated so far would be lost",
            fix="Finish the accumulation, or call engine.flush() to update with what there is",
        )
