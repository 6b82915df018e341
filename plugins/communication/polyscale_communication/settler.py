"""The thread that gives futures their values.

Notable: collectives end in the order of their calls, messages in any order, so a message that does not come must not
hold up the rest. What has ended is settled in the order of the calls; else the thread lingers on the first.
"""

from __future__ import annotations

import queue
import threading
from typing import TYPE_CHECKING

from polyscale import background

if TYPE_CHECKING:
    from polyscale_communication.work import ShmWork

LOOK_S = 1e-3


class Settler:
    """Settles the futures of a group on a thread that the first one starts."""

    def __init__(self) -> None:
        self._new: queue.SimpleQueue[ShmWork | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def add(self, work: ShmWork) -> None:
        """Settle the future of ``work`` when it has ended."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name="shm futures", daemon=True)
                self._thread.start()
        self._new.put(work)

    def close(self) -> None:
        """Let the thread end after the works it has."""
        with self._lock:
            if self._thread is not None:
                self._new.put(None)

    def _serve(self) -> None:
        waiting: list[ShmWork] = []
        while (work := self._new.get()) is not None:
            waiting.append(work)
            del work  # with it the tensors it holds
            with background.working():
                if self._settle(waiting):
                    return

    def _settle(self, waiting: list[ShmWork]) -> bool:
        """Work until nothing waits; whether the thread is to end."""
        closing = False
        while waiting and not background.is_ending():
            while not self._new.empty():
                work = self._new.get()
                closing = closing or work is None
                waiting += [] if work is None else [work]
                del work
            ended = [work for work in waiting if work.is_completed()]
            if not ended:
                waiting[0].linger(LOOK_S)
            for work in ended:
                work.settle()
                waiting.remove(work)
            ended.clear()
        return closing or background.is_ending()
