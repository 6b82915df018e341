"""The watch of one process: its thread, what it knows of the other ranks, and how it ends the process."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from polyscale.control import events, explanations, processes
from polyscale.control.agreement import second_connection
from polyscale.control.events import Event, Log
from polyscale.control.peers import Peers
from polyscale.control.places import Place, left
from polyscale.control.rounds import Rounds, write_error
from polyscale.errors import RankError

if TYPE_CHECKING:
    from polyscale.control.agreement import Control

_POSTED = "_polyscale_posted"
logger = logging.getLogger("polyscale")


@dataclass(frozen=True)
class Timings:
    """Seconds.

    Attributes:
        poll: between two looks.
        beat: between two heartbeats.
        grace: between a failure elsewhere and the end of this process.
        left: how long this rank may sleep in one phase after another one has left.
        stuck: how long all ranks must have waited for one another before that ends them.
        farewell: how long rank 0, whose store the others read, waits for them at its end.
    """

    poll: float = 0.5
    beat: float = 2.0
    grace: float = 2.0
    left: float = 10.0
    stuck: float = 15.0
    farewell: float = 5.0


class Watch:
    """See ``polyscale.control.watchdog``. Made once per control; counted by its users."""

    def __init__(self, control: Control, timings: Timings) -> None:
        self.control = control
        self.timings = timings
        self.place = Place()
        self.peers = Peers(control.rank)
        self._identity = processes.this_process()
        self._group = _default_group()
        self._users = 0
        self._failures = 0
        self._last_word = 0
        self.first: Event | None = None  # rank 0 as it said "here": what is judged when its store has ended
        self.store_ended = False
        self._falling = False
        self.explaining = ""  # where an exception was raised that is being explained
        self._was_here = False
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._hook: Callable[..., Any] | None = None
        self._hook_before: Callable[..., Any] = sys.excepthook

    # The training thread's side.

    def acquire(self) -> None:
        """One more user; the first starts the thread.

        Raises:
            RankError: the store is gone, or rank 0 does not come; nothing has begun then.
        """
        if self._users == 0 and self.control.world_size > 1 and self._is_this_process():
            # Before a connection is made, which is tried for long: where the store is gone this fails at once.
            self.control.call(self._log().write, self.event("here"))
            self._was_here = True
            try:
                self._begin()
            except BaseException:
                self._end_thread()
                self._say_left()
                raise
        self._users += 1

    def _begin(self) -> None:
        store = self.control.call(second_connection, self.control.store)  # here, where an error is raised to the user
        self._stop = threading.Event()
        rounds = Rounds(self, store, self._stop)
        thread = threading.Thread(target=self._run, args=(rounds, self._stop), daemon=True)
        thread.name = "polyscale-watchdog"
        thread.start()
        self._thread = thread
        self._hook_before, self._hook = sys.excepthook, self._on_uncaught
        sys.excepthook = self._hook
        # After the thread has begun: rank 0 may come much later, and others may fail until then.
        self.first = Event(**self.control.introduce(asdict(self.event("here")), what="initialize"))

    def release(self) -> None:
        """One user less; the last ends the thread."""
        self._users = max(self._users - 1, 0)
        if self._users == 0:
            self._leave()

    def leave(self) -> None:
        """Say that this process ends by itself, and end the thread. On rank 0: wait until the others have read it."""
        if not self._is_this_process() or self.control.world_size == 1:
            return
        self._users = 0
        self._end_thread()
        if self._was_here and not self.store_ended:
            with contextlib.suppress(RuntimeError):
                self._last_word = self._log().write(self.event("left", last=True))
                if self.control.rank == 0:
                    self._farewell()

    def abandon(self) -> None:
        """The process group has ended, or was made anew: end the thread and tell no one."""
        self._users = 0
        self._end_thread()

    def group_ended(self) -> bool:
        """Whether the default process group was destroyed, or made anew, since."""
        return self._group is not None and _default_group() is not self._group

    def without_device(self) -> bool:
        """Whether ranks have no accelerator and talk over gloo: one that takes no processor time then only waits."""
        import torch
        import torch.distributed as dist

        return dist.is_initialized() and dist.get_backend() == "gloo" and not torch.accelerator.is_available()

    @property
    def falling(self) -> bool:
        """Whether an uncaught exception is ending this process."""
        return self._falling

    def failed(self, exception: BaseException) -> None:
        """Tell the others about an exception, once."""
        if self._thread is None or not self._is_this_process() or _is_posted(exception):
            return
        _mark_posted(exception)
        self._failures += 1
        self._post(exception, "failed")

    def explain(self, exception: BaseException, *, within: BaseException | None = None) -> RankError | None:
        """Say why the collective that raised ``exception``, perhaps as the cause of ``within``, did not complete."""
        if self._thread is None or not (events.is_communication_error(exception) or events.is_timeout(exception)):
            return None
        rank, doing = self.control.rank, self.place.of(within or exception)
        self.explaining = doing
        try:
            end = time.monotonic() + self.timings.grace + 2 * self.timings.poll
            while not (causes := self.peers.causes(self._failures)) and time.monotonic() < end:
                time.sleep(0.05)
            if causes:
                return explanations.lost(rank, doing, causes)
            if departed := self.peers.departures():
                return explanations.left(rank, doing, departed)
            raised = self.peers.consequences(self._failures)
            if events.is_timeout(exception) or any(event.timeout for event in raised.values()):
                seconds = explanations.seconds_waited(str(exception), *(event.error for event in raised.values()))
                return explanations.out_of_time(rank, doing, seconds, self._where_others_are(raised))
            return None
        finally:
            self.explaining = ""

    def _where_others_are(self, raised: dict[int, Event]) -> dict[int, str]:
        """Where the first few others were: what they raised says it best, as they have left their phase since."""
        others: dict[int, str] = {}
        for rank in [rank for rank in range(min(self.control.world_size, 8)) if rank != self.control.rank]:
            if rank in raised:
                others[rank] = raised[rank].doing + (f" at {raised[rank].line}" if raised[rank].line else "")
                continue
            with contextlib.suppress(RankError):  # the store is gone
                if not self.store_ended and (seen := self.control.last_seen(rank)) is not None:
                    others[rank] = str(seen)
        return others

    def _on_uncaught(
        self, kind: type[BaseException], exception: BaseException, traceback: TracebackType | None
    ) -> None:
        if self._thread is not None and self._is_this_process():
            self._falling = True
            self._post(exception, "fell")
            explained = self.explain(exception)
            if explained is not None:
                write_error(f"polyscale: {explained}\n")
            elif (place := left(exception)) and not isinstance(exception, RankError):
                write_error(f"polyscale: rank {self.control.rank} raised this while {place}:\n")
        self._hook_before(kind, exception, traceback)

    def _post(self, exception: BaseException, kind: Literal["failed", "fell"]) -> None:
        event = events.of_exception(
            exception,
            kind=kind,
            rank=self.control.rank,
            identity=self._identity,
            number=self._failures,
            place=self.place,
        )
        with contextlib.suppress(RuntimeError):  # the store is gone with rank 0: the others see that too
            if not self.store_ended:
                self._log().write(event)

    def _leave(self) -> None:
        if self._end_thread():
            self._say_left()

    def _say_left(self) -> None:
        if not self.store_ended:
            with contextlib.suppress(RuntimeError):
                self._log().write(self.event("left"))

    def _end_thread(self) -> bool:
        thread, self._thread = self._thread, None
        if thread is None:
            return False
        self._stop.set()
        thread.join(timeout=self.timings.farewell)
        if sys.excepthook is self._hook:
            sys.excepthook = self._hook_before
        self._hook = None
        return True

    def _farewell(self) -> None:
        """Wait until every rank that still watches has read that this one left: the store may end with it."""
        log = self._log()
        peers = Peers(self.control.rank)
        end = time.monotonic() + self.timings.farewell
        while time.monotonic() < end:
            peers.take(log.new())
            if all(self._has_read(event, self._last_word) for event in peers.here.values()):
                return
            time.sleep(0.05)

    def _has_read(self, peer: Event, number: int) -> bool:
        if peer.place == self._identity.place and processes.is_gone(peer.identity):
            return True
        key = f"read/{peer.rank}"
        store = self.control.store
        return bool(store.check([key])) and int(store.get(key)) >= number

    def _log(self) -> Log:
        return Log(self.control.store)

    def event(
        self, kind: Literal["here", "left", "stuck"], *, last: bool = False, code: int = 0, text: str = ""
    ) -> Event:
        """A record about this rank."""
        step = self.place.step
        return Event(kind, self.control.rank, **asdict(self._identity), step=step, last=last, code=code, error=text)

    def _is_this_process(self) -> bool:
        return os.getpid() == self._identity.pid  # false in a forked child, such as a worker of a data loader

    # The watchdog thread's side.

    def _run(self, rounds: Rounds, stop: threading.Event) -> None:
        try:
            rounds.run()
        except Exception:
            if not stop.is_set():
                logger.warning("the watchdog of rank %d has stopped", self.control.rank, exc_info=True)

    def pending(self) -> list[Event]:
        """Failures that this rank has not met by one of its own."""
        return [] if self._falling or self.explaining else self.peers.pending(self._failures)


def _default_group() -> Any:
    import torch.distributed as dist

    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


def _is_posted(exception: BaseException) -> bool:
    """Whether this exception, or one it was raised from, has been told."""
    link: BaseException | None = exception
    while link is not None:
        if getattr(link, _POSTED, False):
            return True
        link = link.__cause__
    return False


def _mark_posted(exception: BaseException) -> None:
    with contextlib.suppress(AttributeError, TypeError):  # a class with slots may refuse
        setattr(exception, _POSTED, True)
