"""The communication stream of one group: a thread that runs its collectives one after another.

Notable: a collective is handed over and runs beside the caller, like one on a device's communication stream, and in the
order of the calls; a synchronous one with nothing before it runs on the caller's thread. The thread is started by a
collective, is a daemon (a peer that died must not keep the process), and ends with its group, or when it had nothing to
do for a while: torch keeps some groups longer than their owners do.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from datetime import timedelta

from polyscale import background

IDLE_S = 10.0


class Job:
    """One collective in the queue.

    Attributes:
        error: what it raised, once it is done.
    """

    def __init__(self, run: Callable[[], None]) -> None:
        self._run = run
        self._done = threading.Event()
        self._lock = threading.Lock()
        self._then: list[Callable[[], None]] = []
        self.error: BaseException | None = None

    @property
    def done(self) -> bool:
        """Whether it has run, well or not."""
        return self._done.is_set()

    def execute(self) -> None:
        """Run it, keep what it raises, and call what waits for it."""
        try:
            self._run()
        except BaseException as error:
            self.error = error
        del self._run  # with it the tensors it holds
        with self._lock:
            self._done.set()
            waiting, self._then = self._then, []
        for call in waiting:
            call()

    def wait(self, timeout: timedelta | None = None) -> None:
        """Block until it has run.

        Raises:
            RuntimeError: ``timeout`` is over.
            BaseException: what it raised.
        """
        seconds = timeout.total_seconds() if timeout else None
        if not self._done.wait(seconds):
            raise RuntimeError(f"a collective did not finish within {seconds} s")
        if self.error is not None:
            raise self.error

    def settle(self) -> None:
        """Block until it has run, well or not."""
        self._done.wait()

    def when_done(self, call: Callable[[], None]) -> None:
        """Call ``call`` after it has run: on the thread of the queue, or at once where it has run already."""
        with self._lock:
            if not self._done.is_set():
                self._then.append(call)
                return
        call()


class CommunicationQueue:
    """Runs jobs in order on a thread of its own."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._turn = threading.Lock()
        self._left = 0
        self._running = False

    def run(self, job: Job) -> None:
        """Carry out a job that the caller waits for anyway: on this thread, where nothing is before it."""
        with self._lock:
            alone = self._left == 0
            if alone:
                self._left += 1
                self._turn.acquire()
        if not alone:
            self.submit(job)
            return
        try:
            job.execute()
        finally:
            self._turn.release()
            with self._lock:
                self._left -= 1

    def submit(self, job: Job) -> None:
        """Put a job behind those before it."""
        with self._lock:
            self._jobs.put(job)
            self._left += 1
            if not self._running:
                threading.Thread(target=self._serve, name="simccl", daemon=True).start()
                self._running = True

    def close(self) -> None:
        """Let the thread end after the jobs it has."""
        self._jobs.put(None)

    def _serve(self) -> None:
        while True:
            try:
                job = self._jobs.get(timeout=IDLE_S)
            except queue.Empty:
                job = None
            if job is not None:
                with background.working(), self._turn:
                    job.execute()
                del job  # with it the tensors it holds
                with self._lock:
                    self._left -= 1
                continue
            with self._lock:
                if self._jobs.empty():
                    self._running = False
                    return
