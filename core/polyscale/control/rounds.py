"""What the watchdog's thread does in each round: look, judge, and at worst end the process."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Literal, NoReturn

from polyscale import env
from polyscale.control import explanations, processes
from polyscale.control.agreement import has_timed_out
from polyscale.control.events import Event, Log
from polyscale.control.waits import LATE_S, Seen, WaitClock, hopeless

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

    from polyscale.control.watch import Watch

EXIT_CODE = 75  # EX_TEMPFAIL of sysexits.h: nothing is wrong with this rank, another try may do
_SLOW_PHASES = ("save", "load", "export", "close")  # may wait for a disk for long after the others have ended
_IDLE = 0.02  # share of one core below which the process, but for this thread, counts as waiting


class Rounds:
    """The thread's own state.

    Args:
        watch: what is shared with the training thread.
        store: a connection of this thread's own.
        stop: set when the thread must end.
    """

    def __init__(self, watch: Watch, store: Store, stop: threading.Event) -> None:
        self._watch = watch
        self._control = watch.control
        self._timings = watch.timings
        self._peers = watch.peers
        self._here = processes.this_process()
        self._store = store
        self._log = Log(store)
        self._stop = stop
        self._beats = 0
        self._beat_at = 0.0
        self._heard: dict[int, tuple[str, float]] = {}
        self._listened_at = 0.0
        self._pending_since = 0.0
        self._idle_mark = ((0.0, "", 0), 0.0, 0.0)  # (progress, others that left), time, processor time
        self._idle_looked_at = 0.0
        self._clock = WaitClock()
        self._waited = 0.0
        self._seen: dict[int, Seen] = {}
        self._stuck_since = 0.0

    def run(self) -> None:
        """Look until told to stop, or until the process group has been ended: then no one can wait for anyone."""
        while not self._stop.wait(self._timings.poll) and not self._watch.group_ended():
            self._waited = self._wait_so_far()
            if not self._watch.store_ended:
                try:
                    self._look()
                except RuntimeError as error:  # a c10d connection that has broken once stays so
                    self._watch.store_ended = not has_timed_out(error)
            if self._watch.store_ended:
                self._look_without_store()
            self._judge()

    def _look(self) -> None:
        gone = self._gone_neighbours()
        events = self._log.new()
        self._peers.take(events)
        if any(event.kind == "left" and event.rank == 0 and event.last for event in events):
            self._store.set(f"read/{self._control.rank}", str(self._log.read))
            self._watch.store_ended = True
            return
        for event in gone:  # those that have not said in the meantime that they left
            if event.rank in self._peers.here:
                self._report(event, "gone")
        now = time.monotonic()
        if now - self._beat_at >= self._timings.beat:
            self._beat_at = now
            self._beats += 1
            own = self._own_beat()
            self._store.set(f"beat/{self._control.rank}", own.text())
            self._listen(now)
            if self._control.rank == 0:
                self._find_stuck(own)

    def _gone_neighbours(self) -> list[Event]:
        return [event for event in self._peers.on(self._here.place) if processes.is_gone(event.identity)]

    def _listen(self, now: float) -> None:
        """A host is silent when none of its ranks has given a sign of life for a while.

        Only looks in time count: where this process, or the store, was held up, the signs of others were too.
        """
        ranks = self._peers.next_host(self._here.place, self._control.rank)
        if now - self._listened_at > self._timings.beat + LATE_S:
            self._heard.clear()
        self._listened_at = now
        for event in ranks:
            key = f"beat/{event.rank}"
            beat = self._store.get(key).decode() if self._store.check([key]) else ""
            if self._heard.get(event.rank, (None, 0.0))[0] != beat:
                self._heard[event.rank] = (beat, now)
                return
        if ranks and all(now - self._heard[event.rank][1] > env.heartbeat_s() for event in ranks):
            for event in ranks:
                self._report(event, "silent")

    def _report(self, peer: Event, kind: Literal["gone", "silent"]) -> None:
        """Write that a rank is gone, unless another one has; and know it here in any case."""
        event = replace(peer, kind=kind)
        self._peers.take([event])  # first: the store may end now
        if self._store.add(f"reported/{peer.rank}/{peer.pid}", 1) == 1:
            self._log.write(event)

    def _look_without_store(self) -> None:
        """The store went with rank 0 or with the launcher: judge by the process table alone.

        A rank that ends in order now cannot say so; only the end of rank 0, which says goodbye before it goes, counts.
        Rank 0 may not be in what this thread has read of the log, but start() does not return before it is known; where
        it is not, start() still waits for it, and is told itself that the store is gone.
        """
        if self._watch.first is not None and not self._peers.knows(0):
            self._peers.take([self._watch.first])
        for event in self._gone_neighbours():
            kind: Literal["gone", "left"] = "gone" if event.rank == 0 else "left"
            self._peers.take([replace(event, kind=kind, step=-1)])
        first = self._peers.here.get(0)
        if first is not None and first.place != self._here.place:
            self._peers.take([replace(first, kind="silent")])

    def _judge(self) -> None:
        now = time.monotonic()
        pending = self._watch.pending()
        if not pending:
            self._pending_since = 0.0
        elif not self._pending_since:
            self._pending_since = now
        elif now - self._pending_since >= self._timings.grace:
            self._end(self._about_failures(pending))
        if self._peers.stuck is not None:
            # Rank 0, whose process may hold the store, goes after the others have read why.
            self._stuck_since = self._stuck_since or now
            if self._control.rank != 0 or now - self._stuck_since >= 3 * self._timings.poll:
                self._end(["because the ranks wait for one another:", *self._peers.stuck.error.split("\n")])
        if self._peers.left and self._waits_too_long(now):
            self._end(["because it waits for a rank that has left:", *_some(list(self._peers.left.values()))])

    def _own_beat(self) -> Seen:
        place, said = self._watch.place, self._watch.explaining
        where = (place.phase, place.detail, place.step)
        return Seen(self._beats, said or str(place), line=place.line(), where=where, waited=self._waited)

    def _wait_so_far(self) -> float:
        """Seconds for which this rank has only waited for others, in one place of one phase."""
        place = self._watch.place
        may_sleep = self._watch.falling or not place.phase or place.phase.startswith(_SLOW_PHASES)
        return self._clock.waited(
            (place.since, place.detail, place.step),
            now=time.monotonic(),
            used=time.process_time() - time.thread_time(),
            waits=not may_sleep and place.waits_for_ranks(),
        )

    def _find_stuck(self, own: Seen) -> None:
        """On rank 0: whether all ranks wait for one another. The others are asked only once this one has waited."""
        before, self._seen = self._seen, {}
        alone = any(event.place != self._here.place for event in self._peers.here.values())
        if (
            own.waited < self._timings.stuck
            or alone
            or not self._watch.without_device()
            or self._peers.stuck is not None
        ):
            return
        keys = {rank: f"beat/{rank}" for rank in self._peers.here}
        if not keys or self._watch.pending() or not self._store.check(list(keys.values())):
            return
        beats = self._store.multi_get(list(keys.values()))
        self._seen = {0: own, **{rank: Seen.read(beat.decode()) for rank, beat in zip(keys, beats, strict=True)}}
        if hopeless(self._seen, before, ranks=range(self._control.world_size), seconds=self._timings.stuck):
            event = self._watch.event("stuck", text="\n".join(explanations.stuck(self._seen)))
            self._log.write(event)
            self._peers.stuck = event

    def _waits_too_long(self, now: float) -> bool:
        """Whether this rank has slept in one phase for longer than the grace after a rank's end.

        Waiting in a collective or for the store takes no processor time; computing does, or waits for a processor: on
        a busy machine it may get none for long. Time in which the process was stopped, or the look held up, does not
        count.
        """
        place = self._watch.place
        used = time.process_time() - time.thread_time()
        at = (place.since, place.detail, len(self._peers.left))
        late = now - self._idle_looked_at > LATE_S
        if at != self._idle_mark[0] or late or processes.computes(but=threading.get_native_id()):
            self._idle_mark = (at, now, used)
        self._idle_looked_at = now
        _, marked_at, used_at_mark = self._idle_mark
        waited = now - marked_at
        may_sleep = self._watch.falling or not place.phase or place.phase.startswith(_SLOW_PHASES)
        if may_sleep or waited < self._timings.left:
            return False
        return used - used_at_mark < _IDLE * waited

    def _about_failures(self, causes: list[Event]) -> list[str]:
        lines = ["because another rank has ended or failed:", *_some(causes)]
        if all(event.timeout for event in causes):
            lines.append(f"{explanations.MISMATCH}. {explanations.SAME_CALLS}.")
        return lines

    def _end(self, why: list[str]) -> NoReturn:
        rank, place = self._control.rank, self._watch.place
        line = place.line()
        first, *rest = why
        text = [f"polyscale: rank {rank} ({self._here}) ends {first}", *(f"  {one}" for one in rest)]
        text.append(f"  this rank was {self._watch.explaining or place}" + (f" at {line}" if line else ""))
        _for_at_most(1.0, sys.stdout.flush)
        _for_at_most(1.0, lambda: write_error("\n".join(text) + "\n"))
        if not self._watch.store_ended:
            _for_at_most(1.0, lambda: self._log.write(self._watch.event("left", code=EXIT_CODE)))
        os._exit(EXIT_CODE)


def _some(events: list[Event]) -> list[str]:
    return [*map(str, events[:5]), *([f"and {len(events) - 5} more"] if len(events) > 5 else [])]


def write_error(text: str) -> None:
    """Write to standard error at once: the process ends with it, so no log handler may hold it back."""
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(text)
        sys.stderr.flush()


def _for_at_most(seconds: float, action: Callable[[], object]) -> None:
    """Do something that may block, such as writing to a full pipe; go on after ``seconds`` in any case."""

    def run() -> None:
        with contextlib.suppress(Exception):
            action()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
