"""Reads and writes on a pool of threads.

Notable: an operation is under way until it is waited for, and holds its tensor so long: a second operation on the same
memory is refused in between, whatever the threads have done by then. What is wrong with the arguments is an error at
once; what goes wrong with the file is an error at ``wait``.
"""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from polyscale.errors import PolyscaleError
from polyscale.interfaces.io import IOWork, Path
from polyscale_standard.io.memory import Region, region
from polyscale_standard.io.operation import Operation
from polyscale_standard.io.transfer import Direction

if TYPE_CHECKING:
    import torch

THREADS = 4
CHUNK_BYTES = 8 << 20


class ThreadsIO:
    """Positional reads and writes of contiguous host tensors; may be shared by threads."""

    name = "threads"

    def __init__(self, *, threads: int = THREADS, chunk_bytes: int = CHUNK_BYTES) -> None:
        """``threads``: most transfers at once; ``chunk_bytes``: into which large transfers are cut."""
        self._threads = threads
        self._chunk = chunk_bytes
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._owner = os.getpid()
        self._under_way: list[Operation] = []
        self._closed = False

    def is_available(self) -> bool:
        """True: every system has threads and files."""
        return True

    def why_unavailable(self) -> str:
        """Empty: it is always available."""
        return ""

    def read(self, tensor: torch.Tensor, path: Path, offset: int = 0) -> int:
        """Fill ``tensor`` from ``path`` at byte ``offset``; blocks; returns bytes read."""
        return self._start("read", tensor, path, offset, here=True).wait()

    def write(self, tensor: torch.Tensor, path: Path, offset: int = 0) -> int:
        """Write ``tensor`` to ``path`` at byte ``offset`` (the file is made if absent, never cut); blocks."""
        return self._start("write", tensor, path, offset, here=True).wait()

    def read_async(self, tensor: torch.Tensor, path: Path, offset: int = 0) -> IOWork:
        """As ``read``, at once; the tensor must not be touched until ``wait``."""
        return self._start("read", tensor, path, offset)

    def write_async(self, tensor: torch.Tensor, path: Path, offset: int = 0) -> IOWork:
        """As ``write``, at once; the tensor must not be changed until ``wait``."""
        return self._start("write", tensor, path, offset)

    def wait(self) -> int:
        """Wait for everything under way; returns how many operations ended. The first error is raised at the end."""
        with self._lock:
            operations = list(self._under_way)
        first: PolyscaleError | None = None
        for operation in operations:
            try:
                operation.wait()
            except PolyscaleError as error:
                first = first or error
        if first is not None:
            raise first
        return len(operations)

    def close(self) -> None:
        """Wait, then end the threads, also when an operation failed. A second call does nothing."""
        with self._lock:
            self._closed = True
            pool, self._pool = self._pool, None
        try:
            self.wait()
        finally:
            if pool is not None:
                pool.shutdown()

    def _start(
        self, direction: Direction, tensor: torch.Tensor, path: Path, offset: int, *, here: bool = False
    ) -> Operation:
        """Begin an operation; ``here``: the caller blocks, so what fits one chunk needs no other thread."""
        memory = region(tensor)
        operation = Operation(direction, memory, _checked_path(path), _checked_offset(offset), ended=self._forget)
        with self._lock:
            self._refuse_closed()
            self._refuse_overlap(operation, memory)
            pool = None if here and memory.size <= self._chunk else self._threads_started()
            self._under_way.append(operation)
        try:
            operation.begin(pool, self._chunk)
        except BaseException:
            self._forget(operation)
            raise
        return operation

    def _threads_started(self) -> ThreadPoolExecutor:
        if self._pool is None or self._owner != os.getpid():  # a fork copies the pool, not its threads
            self._owner = os.getpid()
            self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="polyscale-io")
        return self._pool

    def _forget(self, operation: Operation) -> None:
        with self._lock:
            self._under_way = [each for each in self._under_way if each is not operation]

    def _refuse_closed(self) -> None:
        if self._closed:
            raise PolyscaleError(
                "An operation on a closed I/O object",
                why="Its threads have ended",
                fix="Make a new one, or close later",
            )

    def _refuse_overlap(self, operation: Operation, memory: Region) -> None:
        for other in self._under_way:
            if other.memory is not None and other.memory.overlaps(memory):
                raise PolyscaleError(
                    f"Asked for {operation.describe()}",
                    why=f"The tensor's memory overlaps {other.describe()}, which is under way",
                    fix="Call wait() on that operation first",
                )


def _checked_path(path: Path) -> str:
    try:
        return os.fsdecode(os.fspath(path))
    except TypeError:
        raise PolyscaleError(f"path={path!r}", why="It is no path", fix="Give a str or a pathlib.Path") from None


def _checked_offset(offset: int) -> int:
    if isinstance(offset, bool) or not isinstance(offset, int) or offset < 0:
        raise PolyscaleError(
            f"offset={offset!r}", why="It counts bytes from the start of the file", fix="Give 0 or more"
        )
    return offset
