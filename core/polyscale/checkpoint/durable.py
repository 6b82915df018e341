"""Files that are whole or absent after a crash: write aside, fsync, rename, fsync the directory.

Notable: imports no torch, so that the directory protocol can be used and tested alone.
"""

from __future__ import annotations

import os
from pathlib import Path


def fsync_file(path: Path) -> None:
    """Wait until the bytes of ``path`` are on the device."""
    descriptor = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_directory(path: Path) -> None:
    """Wait until the names in ``path`` are on the device (Windows has no such call, and needs none)."""
    if os.name != "nt":
        fsync_file(path)


def fsync_tree(path: Path) -> None:
    """Wait until everything below ``path`` is on the device, directories after what they hold."""
    for folder, _, files in os.walk(path, topdown=False):
        for name in files:
            fsync_file(Path(folder, name))
        fsync_directory(Path(folder))


def make_directory(path: Path) -> None:
    """Make ``path`` and what is missing above it, each name on the device before the next."""
    if path.is_dir():
        return
    if path.parent != path:
        make_directory(path.parent)
    path.mkdir(exist_ok=True)
    fsync_directory(path.parent)


def write_bytes(path: Path, data: bytes) -> None:
    """Write a new file and fsync it; a failure leaves no file."""
    try:
        with path.open("wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
    except BaseException:
        path.unlink(missing_ok=True)
        raise
