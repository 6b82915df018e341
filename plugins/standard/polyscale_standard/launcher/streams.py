"""The output of ranks: read from pipes as it comes, shown line by line as ``[rank N] text``, kept in files if wanted.

Notable: one thread serves every rank. The agent opens the write ends by path (``/dev/fd/N``) and keeps them open, so
the end of the output is not end-of-file: :meth:`RankStreams.close` drains what is left. A reader that has gone
(``| head``) or a full disk must not stop the ranks: their output is still read, and dropped.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, TextIO

from polyscale.errors import PolyscaleError

logger = logging.getLogger("polyscale")
_CHUNK = 1 << 16
_REFRESH_S = 1.0


class Console:
    """A text stream of this process that takes whole lines of bytes from several ranks."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._gone = False

    def line(self, data: bytes) -> None:
        """Write one line and flush it; does nothing once the reader has gone."""
        if self._gone:
            return
        try:
            raw = getattr(self._stream, "buffer", None)
            if raw is None:
                self._stream.write(data.decode("utf-8", "replace"))
            else:
                raw.write(data)
            self._stream.flush()
        except (OSError, ValueError):
            self._gone = True


@dataclass
class LineBuffer:
    """Cuts one stream of bytes into lines as a terminal would show them.

    A progress bar rewrites its line after a carriage return: of the pieces of a line the last is kept, and the bar so
    far is shown at most once a second.
    """

    console: Console
    prefix: bytes
    _pending: bytes = b""
    _shown: float = field(default_factory=lambda: time.monotonic())

    def feed(self, data: bytes) -> None:
        """Take bytes as they come."""
        *lines, rest = (self._pending + data).split(b"\n")
        for line in lines:
            self._show(line.rstrip(b"\r"))
        done, bar, unfinished = rest.rpartition(b"\r")
        if len(unfinished) >= _CHUNK:
            self._show(unfinished)
            unfinished = b""
        elif bar and done and time.monotonic() - self._shown >= _REFRESH_S:
            self._show(done)
            done = b""
        self._pending = done[-_CHUNK:] + bar + unfinished if done else unfinished

    def close(self) -> None:
        """Show an unfinished last line."""
        if self._pending.strip(b"\r"):
            self._show(self._pending.rstrip(b"\r"))
        self._pending = b""

    def _show(self, line: bytes) -> None:
        self._shown = time.monotonic()
        self.console.line(self.prefix + line.rpartition(b"\r")[2] + b"\n")


@dataclass
class _Source:
    """One stream of one rank."""

    read_fd: int
    write_fd: int
    lines: LineBuffer
    log: BinaryIO | None

    def take(self) -> bool:
        """Move what is there; returns whether there was anything."""
        try:
            data = os.read(self.read_fd, _CHUNK)
        except BlockingIOError:
            return False
        if not data:
            return False
        self.lines.feed(data)
        self._keep(data)
        return True

    def _keep(self, data: bytes) -> None:
        if self.log is None:
            return
        try:
            self.log.write(data)
        except OSError as error:
            logger.warning("The log %s ends here: %s", self.log.name, error)
            self.log = None

    def close(self) -> None:
        self.lines.close()
        os.close(self.read_fd)
        os.close(self.write_fd)
        if self.log is not None:
            with contextlib.suppress(OSError):
                self.log.close()


class RankStreams:
    """Pipes, prefixes and log files of ``nproc`` ranks.

    Args:
        nproc: number of ranks.
        consoles: where stdout and stderr of the ranks are shown.
        log_dir: folder for ``rank<N>.stdout.log`` and ``rank<N>.stderr.log``; what is there already is kept, and
            appended to.

    Raises:
        PolyscaleError: the folder cannot be made or written.
    """

    STREAMS = ("stdout", "stderr")

    def __init__(self, nproc: int, *, consoles: tuple[TextIO, TextIO], log_dir: str | None = None) -> None:
        shown = [Console(stream) for stream in consoles]
        logs = _open_logs(log_dir, nproc, self.STREAMS)
        self._sources = [
            [self._source(console, rank, log) for console, log in zip(shown, logs[rank], strict=True)]
            for rank in range(nproc)
        ]
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._pump, name="rank-output", daemon=True)
        self._thread.start()

    def paths(self, rank: int) -> tuple[str, str]:
        """Paths that the streams of ``rank`` are written to, in this process."""
        stdout, stderr = (f"/dev/fd/{source.write_fd}" for source in self._sources[rank])
        return stdout, stderr

    def close(self) -> None:
        """Show and keep all that ranks have written; call it when they have ended."""
        self._ended.set()
        self._thread.join()
        for source in self._all():
            source.close()

    @staticmethod
    def _source(console: Console, rank: int, log: BinaryIO | None) -> _Source:
        read_fd, write_fd = os.pipe()
        os.set_blocking(read_fd, False)
        return _Source(read_fd, write_fd, LineBuffer(console, b"[rank %d] " % rank), log)

    def _all(self) -> list[_Source]:
        return [source for pair in self._sources for source in pair]

    def _pump(self) -> None:
        with selectors.DefaultSelector() as selector:
            for source in self._all():
                selector.register(source.read_fd, selectors.EVENT_READ, source)
            while True:
                ending = self._ended.is_set()
                ready = selector.select(timeout=0.05)
                moved = [key.data.take() for key, _ in ready]
                if ending and not any(moved):
                    return


def _open_logs(log_dir: str | None, nproc: int, streams: Sequence[str]) -> list[list[BinaryIO | None]]:
    if log_dir is None:
        return [[None for _ in streams] for _ in range(nproc)]
    folder = Path(log_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return [
            [(folder / f"rank{rank}.{name}.log").open("ab", buffering=0) for name in streams] for rank in range(nproc)
        ]
    except OSError as error:
        raise PolyscaleError(
            f"Log folder {log_dir}", why=f"it cannot be written: {error.strerror or error}", fix="Name another folder"
        ) from error
