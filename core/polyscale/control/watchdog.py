"""Watchdog: no rank waits for ever for one that has failed or is gone.

Notable:

- One daemon thread per process with a store connection of its own, shared by all engines of the process; none in a
  world of 1. It looks every half second: one request for the log of events, one look at the process table for each
  rank of this host. Heartbeats matter between hosts only: the first rank of each host watches that of the next one,
  so a rank that holds the interpreter's lock for minutes is not taken for dead by its neighbours.
- After a failure elsewhere a rank has a short grace. One that raises as well keeps its own exception, and goes on if
  the user catches it on all ranks: the n-th failure of one rank is met by the n-th of each other. After the grace the
  process prints who failed, where, and where it is itself, and ends with code 75 (EX_TEMPFAIL).
- A rank that left without an error ends no one, unless this one then sleeps in one phase for longer than a second
  grace.
- Ranks that make different calls wait for one another until a time-out. Then the error says where each of them is; on
  one host without an accelerator, where it can be known for certain (see ``waits``), they end after 15 seconds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from polyscale.control.places import Phase
from polyscale.control.rounds import EXIT_CODE
from polyscale.control.watch import Timings, Watch
from polyscale.errors import RankError

if TYPE_CHECKING:
    from polyscale.control.agreement import Control

__all__ = ["EXIT_CODE", "Phase", "Timings", "Watchdog"]


class Watchdog:
    """One engine's handle on the watch of its process.

    Args:
        control: what ranks share; all watchdogs of one control share one thread.
        timings: how often to look and how long to wait; taken from the first watchdog of a control.
    """

    def __init__(self, control: Control, timings: Timings | None = None) -> None:
        if control.watch is None:
            control.watch = Watch(control, timings or Timings())
        self._watch: Watch = control.watch
        self._place = self._watch.place
        self._started = False

    def start(self) -> None:
        """Begin to watch, and let the other ranks watch this one. A second call does nothing.

        Returns when rank 0 has begun as well.

        Raises:
            RankError: rank 0 does not come in time, or the store is gone; another call may try again.
        """
        if not self._started:
            self._watch.acquire()
            self._started = True

    def stop(self) -> None:
        """Watch no longer; after the last watchdog's stop no thread remains. A second call does nothing."""
        if self._started:
            self._started = False
            self._watch.release()

    def phase(self, name: str) -> Phase:
        """Say what this thread does, in a ``with`` statement. Writes attributes only."""
        return Phase(self._place, name)

    def note(self, detail: str) -> None:
        """Say at which module or unit of the current phase, and in which collective: "h.3 reduce_scatter".

        Writes an attribute only, so that a backend can call it for every collective, from any thread. It is told with
        the phase when this rank or one that waits for it ends, and is dropped with the phase.
        """
        self._place.detail = detail

    def stepped(self, step: int) -> None:
        """Say how many updates were done. Writes an attribute only."""
        self._place.step = step

    def failed(self, exception: BaseException) -> None:
        """Tell the other ranks that this one raised inside the engine. The same exception is told once."""
        self._watch.failed(exception)

    def explain(self, exception: BaseException, *, within: BaseException | None = None) -> RankError | None:
        """If ``exception``, perhaps the cause of ``within``, is what the loss of another rank looks like, name that.

        If it is a collective's time-out and no rank is lost, say where every rank is. Waits a moment for the watchdog
        to find out. None when it is an error of this rank's own.
        """
        return self._watch.explain(exception, within=within)
