"""One read or write under way."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from concurrent.futures import wait as wait_for

from polyscale.errors import PolyscaleError
from polyscale_standard.io.memory import Region
from polyscale_standard.io.transfer import Direction, OpenFile


class Operation:
    """A transfer between ``memory`` and a file, in chunks. It holds the tensor until ``wait`` has returned."""

    def __init__(
        self, direction: Direction, memory: Region, path: str, offset: int, *, ended: Callable[[Operation], None]
    ) -> None:
        """``ended`` is called once, when the operation has been waited for."""
        self.memory: Region | None = memory
        self._direction, self._path, self._offset, self._size = direction, path, offset, memory.size
        self._ended: Callable[[Operation], None] | None = ended
        self._file: OpenFile | None = None
        self._futures: list[Future[None]] = []
        self._chunks_left = 0
        self._error: PolyscaleError | None = None
        self._count_lock = threading.Lock()
        self._wait_lock = threading.Lock()

    def begin(self, pool: Executor | None, chunk: int) -> None:
        """Open the file and hand the chunks to ``pool``; None: move them in this thread, before returning."""
        try:
            self._file = OpenFile(self._path, self._direction, self._offset, self._size)
        except PolyscaleError as error:
            self._error = error
            return
        starts = range(0, self._size, chunk)
        self._chunks_left = len(starts)
        if not starts:
            self._close_file()
        for start in starts:
            if pool is None:
                self._move(start, chunk)
            else:
                self._futures.append(pool.submit(self._move, start, chunk))

    def wait(self) -> int:
        """Block until done; returns the bytes moved. A second call returns, or raises, the same.

        Raises:
            PolyscaleError: short read, full disk, missing file.
        """
        with self._wait_lock:
            wait_for(self._futures)
            ended, self._ended = self._ended, None
            self.memory = None
            if ended is not None:
                ended(self)
        for future in self._futures:
            future.result()
        if self._error is not None:
            raise self._error
        return self._size

    def describe(self) -> str:
        """What it does, for messages."""
        word = "from" if self._direction == "read" else "to"
        return f"a {self._direction} of {self._size} bytes {word} {self._path} at byte {self._offset}"

    def _move(self, start: int, chunk: int) -> None:
        memory, file = self.memory, self._file
        try:
            if memory is not None and file is not None and self._error is None:
                file.move(memory.view()[start : start + chunk], start)
        except PolyscaleError as error:
            self._error = self._error or error
        finally:
            with self._count_lock:
                self._chunks_left -= 1
                last = self._chunks_left == 0
            if last:
                self._close_file()

    def _close_file(self) -> None:
        file, self._file = self._file, None
        try:
            if file is not None:
                file.close()
        except PolyscaleError as error:
            self._error = self._error or error
