"""One builder per module at a time: a lock that ends with its owner, and who the owner is.

Notable: the lock is the operating system's (``filelock``), so nothing a killed process leaves behind can block the next
one; the file beside it that names the owner is for people only, and a stale one is overwritten.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from polyscale import env
from polyscale.errors import BuildError

logger = logging.getLogger("polyscale")
LOCK, OWNER = ".lock", ".owner"
_POLL_S = 0.1


@contextlib.contextmanager
def locked(folder: Path, doing: str, *, wait: bool = True) -> Iterator[bool]:
    """Hold the lock of ``folder``; made if absent. Waits for another holder, and says for whom.

    Args:
        folder: that of a module in the cache.
        doing: what is to be done, for the line that says what is waited for ("Kernel module x").
        wait: False: another holder is an error.

    Yields:
        Whether somebody else was waited for.

    Raises:
        BuildError: the folder cannot be written; or another process holds the lock, and is not to be waited for.
    """
    from filelock import FileLock, Timeout

    waited = False
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / LOCK)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            if not wait:
                holder = f"{owner(folder)} is building it"
                raise BuildError(doing, why=holder, fix="Run this again when it has ended") from None
            waited = True
            level = logging.WARNING if env.launch().rank == 0 else logging.INFO
            logger.log(level, "%s: waiting for %s", doing, owner(folder))
            lock.acquire(poll_interval=_POLL_S)
    except (OSError, NotImplementedError) as error:
        raise unwritable(folder, error) from error
    try:
        _write_owner(folder)
        yield waited
    finally:
        with contextlib.suppress(OSError):
            (folder / OWNER).unlink(missing_ok=True)
        lock.release()


def owner(folder: Path) -> str:
    """Who holds the lock of ``folder``, in words."""
    try:
        found = json.loads((folder / OWNER).read_text(encoding="utf-8"))
        return f"process {found['pid']} on {found['host']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"


def unwritable(folder: Path, error: Exception) -> BuildError:
    """The error of a cache folder that cannot be written."""
    reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return BuildError(
        f"Kernel cache {folder}",
        why=f"it cannot be written: {reason}",
        fix=f"Set {env.CACHE} to a folder that can be written",
    )


def refusal(folder: Path) -> BuildError | None:
    """The error that making and filling ``folder`` would meet, as far as its permissions tell; writes nothing."""
    there = next(place for place in (folder, *folder.parents) if os.access(place, os.F_OK))  # false where it is hidden
    if there.is_dir() and os.access(there, os.W_OK | os.X_OK):
        return None
    return unwritable(folder, OSError(0, f"{there} is read-only here" if there.is_dir() else f"{there} is no folder"))


def _write_owner(folder: Path) -> None:
    """Name this process, by a rename: a reader sees a whole file or none."""
    new = folder / f"{OWNER}.{os.getpid()}"
    try:
        new.write_text(json.dumps({"pid": os.getpid(), "host": socket.gethostname()}), encoding="utf-8")
        new.replace(folder / OWNER)
    except OSError:
        with contextlib.suppress(OSError):
            new.unlink(missing_ok=True)
