"""What surrounds every piece of an engine's work: the watchdog, the clock, and what an exception leaves behind."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator

from polyscale.control.events import is_communication_error, is_timeout
from polyscale.control.places import left
from polyscale.engine import out_of_memory
from polyscale.engine.accumulation import Accumulation
from polyscale.engine.setup import Setup
from polyscale.engine.stepping import Stepper
from polyscale.errors import OutOfMemoryError, PolyscaleError, RankError

log = logging.getLogger("polyscale")


class Guard:
    """Runs the parts of a step, and knows whether the last one ended well.

    Attributes:
        seconds: time by part since they were last taken, where ``wall_clock_breakdown`` is on.
    """

    def __init__(self, setup: Setup, accumulation: Accumulation, stepper: Stepper) -> None:
        self.seconds: dict[str, float] = {}
        self._setup = setup
        self._accumulation = accumulation
        self._stepper = stepper
        self._broken = self._where = ""

    @contextlib.contextmanager
    def doing(self, what: str, *, step: bool = True, timed: bool = True) -> Iterator[None]:
        """Tell the watchdog what runs and time it; an exception is told to the other ranks, and made clearer.

        Args:
            what: the part, in the words of a message.
            step: whether it is part of a training step, which an exception leaves incomplete.
            timed: whether its time is told with the step's.
        """
        setup = self._setup
        timed = timed and setup.config.wall_clock_breakdown
        started = time.perf_counter() if timed else 0.0
        try:
            with setup.watchdog.phase(what):
                yield
        except BaseException as error:
            if step:
                self._broken, self._where = what, left(error)
            if isinstance(error, OutOfMemoryError):  # of a part inside this one, and already told
                raise
            # No local variable may hold an exception: its traceback holds this frame, and both would live on.
            if isinstance(error, Exception) and out_of_memory.found_in(error) is not None:
                raise self._out_of_memory(error, what, step) from error
            seen = _failed_collective(error)
            if not isinstance(error, Exception) or (isinstance(error, PolyscaleError) and seen is None):
                raise
            if step:
                setup.watchdog.failed(error)
            clearer = setup.applied.explain(seen or error) or setup.watchdog.explain(seen or error, within=error)
            try:
                if clearer is not None:
                    raise clearer from error
                raise
            finally:
                del clearer, seen
        if timed:
            setup.accelerator.synchronize()
            self.seconds[what] = self.seconds.get(what, 0.0) + time.perf_counter() - started

    def _out_of_memory(self, error: Exception, what: str, step: bool) -> out_of_memory.OutOfMemory:
        """Say who holds the memory, then free all that the failed part has left, so that the device can be used."""
        if step:
            self._setup.watchdog.failed(error)
        made = out_of_memory.of_engine(self._setup, error, what, torn=self._stepper.torn)
        out_of_memory.let_go(error)
        try:
            if step:
                self._drop()
            self._setup.accelerator.empty_cache()
        except Exception as further:  # such as a peer that has gone meanwhile; the next forward tries again
            log.warning("after running out of memory, not everything could be freed: %s", further)
        return made

    def require_whole(self, doing: str) -> None:
        """Refuse to use weights of which an interrupted update has written some.

        Raises:
            PolyscaleError: there are such.
        """
        if self._stepper.torn:
            raise PolyscaleError(
                f"{doing} after an update that was interrupted in the middle",
                why="some weights and optimizer states are of the new step, others of the old one",
                fix="Load a checkpoint with engine.load(...), which restores all of them",
            )

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

    def recover(self, *, alone: bool = False) -> None:
        """Drop the accumulation in which an exception was raised, if there is one. Then collective, unless ``alone``.

        Raises:
            RankError: other ranks raised somewhere else, so that their collectives would no longer pair up.
        """
        if not self._broken:
            return
        if not alone:
            self._agree()
        self._drop()
        self._broken = self._where = ""

    def _drop(self) -> None:
        if self._accumulation.open:
            log.warning("the accumulation in which an exception was raised (in %s) is dropped", self._broken)
        self._accumulation.reset()
        self._setup.applied.recover()

    def _agree(self) -> None:
        where = self._setup.control.share("recover", self._where, what="Training after an exception")
        other = next((rank for rank, place in enumerate(where) if place != where[0]), None)
        if other is not None:
            raise RankError(
                f"Training after exceptions in different places: rank 0 raised {where[0]}, rank {other} {where[other]}",
                why="collectives that some ranks have begun and others have not would be paired with later ones",
                fix="Start the ranks again from a checkpoint",
            )


def _failed_collective(error: BaseException) -> Exception | None:
    """The backend's error in one that a communication plugin raised: it says that a rank is lost, not which."""
    cause = error.__cause__ if isinstance(error, RankError) else None
    if isinstance(cause, RuntimeError) and (is_communication_error(cause) or is_timeout(cause)):
        return cause
    return None
