"""Moving bytes between memory and one open file, at given offsets.

Notable: where the system has positional calls several threads share one descriptor; elsewhere (Windows) a lock holds
seek and transfer together. Opening never waits, even for a named pipe.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
import sys
import threading
from pathlib import Path
from typing import Literal

from polyscale.errors import PolyscaleError

Direction = Literal["read", "write"]

# Most systems move at most 2 GiB less a page in one call.
_CALL_BYTES = 1 << 30

_FIXES = {
    errno.ENOENT: "Check the path; its folder must exist",
    errno.ENOTDIR: "Check the path; a part of it is a file",
    errno.EISDIR: "Give the path of a file",
    errno.EACCES: "Check the permissions of the file and its folders",
    errno.EPERM: "Check the permissions of the file and its folders",
    errno.EROFS: "Give a path on a file system that can be written",
    errno.ENOSPC: "Free space, or give a path on another file system",
    errno.EFBIG: "Raise the limit on file sizes (ulimit -f), or use a file system that takes larger files",
    errno.ESPIPE: "Give a regular file: a pipe has no offsets",
    errno.ENXIO: "Give a regular file: a pipe has no offsets",
    errno.EMFILE: "Raise the limit on open files (ulimit -n)",
}
if hasattr(errno, "EDQUOT"):
    _FIXES[errno.EDQUOT] = "Free space within the quota, or give a path on another file system"


class OpenFile:
    """One file, open for one operation over ``size`` bytes at ``offset``."""

    def __init__(self, path: str, direction: Direction, offset: int, size: int, positional: bool | None = None) -> None:
        """Open ``path``; a file to write is made if absent, and never cut.

        Args:
            path: the file.
            direction: of the operation.
            offset: where the operation begins, in bytes.
            size: of the operation, in bytes.
            positional: whether to use positional calls; None: where the system has them.

        Raises:
            PolyscaleError: it cannot be opened, or is shorter than what is to be read.
        """
        self._path, self._direction, self._offset, self._size = path, direction, offset, size
        has = hasattr(os, "preadv") and hasattr(os, "pwrite")
        self._positional = has if positional is None else positional
        self._lock = threading.Lock()
        flags = os.O_RDONLY if direction == "read" else os.O_WRONLY | os.O_CREAT
        for extra in ("O_CLOEXEC", "O_BINARY", "O_NOINHERIT", "O_NONBLOCK"):
            flags |= getattr(os, extra, 0)
        try:
            self._descriptor = os.open(path, flags, 0o666)
        except (OSError, ValueError) as error:
            raise self.failure(error) from error
        if direction == "read":
            self._refuse_short_file()

    def move(self, view: memoryview, start: int) -> None:
        """Move all of ``view``, whose first byte belongs at ``start`` bytes into the operation.

        Raises:
            PolyscaleError: the file ended, or the system refused.
        """
        done = 0
        while done < len(view):
            piece = view[done : done + _CALL_BYTES]
            try:
                moved = self._call(piece, self._offset + start + done)
            except OSError as error:
                raise self.failure(error, at=self._offset + start + done) from error
            if moved == 0:
                raise self._ended(self._offset + start + done)
            done += moved

    def close(self) -> None:
        """Close it. Some file systems report a failed write only here.

        Raises:
            PolyscaleError: the system reports one.
        """
        try:
            os.close(self._descriptor)
        except OSError as error:
            raise self.failure(error) from error

    def failure(self, error: OSError | ValueError, *, at: int | None = None) -> PolyscaleError:
        """Say what the system refused; ``at``: the byte of the file where a transfer stopped."""
        number = getattr(error, "errno", None) or 0
        why = getattr(error, "strerror", None) or str(error)
        if at is not None:
            why += f", at byte {at} of the file"
        if number == errno.ENOSPC:
            why += self._free_space()
        return PolyscaleError(self._given(), why=why, fix=_FIXES.get(number, "Check the path and its file system"))

    def _call(self, piece: memoryview, at: int) -> int:
        if self._positional and sys.platform != "win32":
            return os.preadv(self._descriptor, [piece], at) if self._reads else os.pwrite(self._descriptor, piece, at)
        with self._lock:
            os.lseek(self._descriptor, at, os.SEEK_SET)
            if not self._reads:
                return os.write(self._descriptor, piece)
            data = os.read(self._descriptor, len(piece))
            piece[: len(data)] = data
            return len(data)

    @property
    def _reads(self) -> bool:
        return self._direction == "read"

    def _refuse_short_file(self) -> None:
        status = os.fstat(self._descriptor)
        if stat.S_ISREG(status.st_mode) and status.st_size < self._offset + self._size:
            self.close()
            raise self._ended(status.st_size)

    def _ended(self, end: int) -> PolyscaleError:
        actual = max(0, end - self._offset)
        verb = "holds" if self._reads else "took"
        return PolyscaleError(
            self._given(),
            why=f"Expected {self._size} bytes, but the file {verb} {actual} there (it ends at byte {end})",
            fix="Check that the file is whole, and that tensor and offset are those it was written with",
        )

    def _given(self) -> str:
        verb, word = ("Reading", "from") if self._reads else ("Writing", "to")
        return f"{verb} {self._size} bytes {word} {self._path} at byte {self._offset}"

    def _free_space(self) -> str:
        try:
            return f" ({shutil.disk_usage(Path(self._path).parent).free} bytes are free)"
        except OSError:
            return ""
