"""What surrounds every piece of an engine's work: the watchdog, the clock, and what an exception leaves behind."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator

from polyscale.engine.accumulation import Accumulation
from polyscale.engine.setup import Setup
from polyscale.errors import PolyscaleError

log = logging.getLogger("polyscale")


class Guard:
    """Runs the parts of a step, and knows whether the last one ended well.

    Attributes:
        seconds: time by part since they were last taken, where ``wall_clock_breakdown`` is on.
    """

    def __init__(self, setup: Setup, accumulation: Accumulation) -> None:
        self.seconds: dict[str, float] = {}
        self._setup = setup
        self._accumulation = accumulation
        self._broken = ""

    @contextlib.contextmanager
    def doing(self, what: str, *, step: bool = True) -> Iterator[None]:
        """Tell the watchdog what runs and time it; an exception is told to the other ranks, and made clearer.

        Args:
            what: the part, in the words of a message.
            step: whether it is part of a training step, which an exception leaves incomplete.
        """
        setup = self._setup
        timed = setup.config.wall_clock_breakdown
        started = time.perf_counter() if timed else 0.0
        try:
            with setup.watchdog.phase(what):
                yield
        except BaseException as error:
            if step:
                self._broken = what
            if not isinstance(error, Exception) or isinstance(error, PolyscaleError):
                raise
            if step:
                setup.watchdog.failed(error)
            clearer = setup.applied.explain(error) or setup.watchdog.explain(error)
            if clearer is not None:
                raise clearer from error
            raise
        if timed:
            setup.accelerator.synchronize()
            self.seconds[what] = self.seconds.get(what, 0.0) + time.perf_counter() - started

    def require_sound(self, doing: str) -> None:
        """Refuse to go on with an accumulation in which an exception was raised.

        Raises:
            PolyscaleError: one was raised since the last forward.
        """
        if self._broken:
            raise PolyscaleError(
                f"{doing} after an exception in {self._broken}",
                why="some gradients of this accumulation are missing",
                fix="Call engine(...) again: the incomplete accumulation is dropped and a new one begins",
            )

    def recover(self) -> None:
        """Drop the accumulation in which an exception was raised, if there is one."""
        if not self._broken:
            return
        if self._accumulation.open:
            log.warning("the accumulation in which an exception was raised (in %s) is dropped", self._broken)
        self._setup.applied.recover()
        self._accumulation.reset()
        self._broken = ""
