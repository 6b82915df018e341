"""Runs the example under ``scale run`` and hands over, as they come, the numbers that rank 0 prints."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

Record = dict[str, Any]
PREFIX = "[rank 0] "
GRACE_S = 15.0


class RunFailed(Exception):
    """The ranks ended with another code than 0."""

    def __init__(self, code: int) -> None:
        super().__init__(f"The ranks ended with code {code}")
        self.code = code


def run(
    script: Path,
    arguments: Sequence[str],
    *,
    nproc: int,
    log: Path,
    on_record: Callable[[Record], None],
    on_error: Callable[[str], None],
) -> None:
    """Run ``script`` on ``nproc`` ranks to its end.

    Args:
        script: prints one JSON object per line on rank 0.
        arguments: of the script.
        nproc: number of ranks of this host.
        log: all output is appended to it.
        on_record: given each JSON object.
        on_error: given each line that the ranks or the launcher write to stderr; called in another thread.

    Raises:
        RunFailed: with the exit code of the first rank that failed.
        KeyboardInterrupt: after the ranks have ended.
    """
    command = [sys.executable, "-m", "polyscale", "run", "--nproc", str(nproc), str(script), *arguments]
    with log.open("a", buffering=1, encoding="utf-8") as file:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace")
        assert process.stdout is not None
        assert process.stderr is not None
        quiet = threading.Event()
        relay = threading.Thread(target=_relay, args=(process.stderr, file, on_error, quiet), daemon=True)
        relay.start()
        try:
            for line in process.stdout:
                _take(line, file, on_record)
            code = process.wait()
        except BaseException:
            quiet.set()  # where the ranks were when they were interrupted is in the log
            _end(process)
            raise
        finally:
            relay.join(timeout=GRACE_S)
    if code:
        raise RunFailed(code)


def _take(line: str, log: IO[str], on_record: Callable[[Record], None]) -> None:
    log.write(line)
    text = line.removeprefix(PREFIX)
    if text.startswith("{"):
        with contextlib.suppress(json.JSONDecodeError):
            on_record(json.loads(text))


def _relay(stream: IO[str], log: IO[str], on_error: Callable[[str], None], quiet: threading.Event) -> None:
    for line in stream:
        with contextlib.suppress(ValueError, OSError):  # the log is closed or full: people still see the line
            log.write(line)
        if not quiet.is_set():
            on_error(line.rstrip("\n"))


def _end(process: subprocess.Popen[str]) -> None:
    """Ask the launcher to end its ranks, which it does within seconds; kill it where it does not."""
    process.send_signal(signal.SIGINT)
    if process.stdout is not None:
        process.stdout.close()
    try:
        process.wait(timeout=GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
