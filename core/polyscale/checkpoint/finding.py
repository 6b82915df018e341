"""CheckpointFinder: which checkpoints are in a directory, and where; and why one that is asked for is not.

Notable: changes nothing, so any rank and any tool may use it. A checkpoint that an interrupted overwrite left aside is
found under its tag. Imports no torch.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from os import PathLike
from pathlib import Path

from polyscale.checkpoint.faults import failure
from polyscale.checkpoint.names import LATEST, MANIFEST, Hidden, Purpose, check_name
from polyscale.errors import CheckpointError, nearest

_log = logging.getLogger("polyscale")


class CheckpointFinder:
    """The checkpoints in one directory, for reading.

    Args:
        root: the directory.
    """

    def __init__(self, root: str | PathLike[str]) -> None:
        self.root = Path(root)

    def path(self, tag: str) -> Path:
        """Where the finished checkpoint ``tag`` lies, or would lie."""
        return self.root / check_name(tag)

    def tags(self) -> list[str]:
        """Finished checkpoints that can be loaded, numbers in them in numeric order."""
        found = {path.name for path in self._entries() if not path.name.startswith(".") and finished(path)}
        found |= {hidden.tag for hidden in self.hidden("old")}
        return sorted(found, key=_natural)

    def latest(self) -> str:
        """The tag that ``latest`` names.

        Raises:
            CheckpointError: there is no such file, or what it says is no tag.
        """
        try:
            text = (self.root / LATEST).read_text(encoding="utf-8").strip()
        except FileNotFoundError:
            raise self._no_latest() from None
        except (OSError, UnicodeDecodeError) as error:
            raise failure(self.root / LATEST, "read", error) from error
        try:
            return check_name(text)
        except CheckpointError as error:
            raise CheckpointError(
                f"{self.root / LATEST} says {text[:80]!r}", why=error.why, fix=self._name_one()
            ) from None

    def resolve(self, tag: str | None = None) -> Path:
        """Where to load from: ``tag``, or the newest when None. Any rank; changes nothing.

        Raises:
            CheckpointError: no such directory, no ``latest``, no such tag, or one that was not finished.
        """
        if not self.root.is_dir():
            why = "it is a file" if self.root.exists() else "there is no such directory"
            raise CheckpointError(f"Checkpoint directory '{self.root}'", why=why, fix="Check the path")
        newest = tag is None
        tag = self.latest() if tag is None else tag
        path = self.path(tag)
        if finished(path):
            return path
        for hidden in self.hidden("old", tag=tag):
            _log.warning("%s: its replacement was interrupted; the replaced one is used", path)
            return self.root / str(hidden)
        raise self._not_loadable(tag, path, newest=newest)

    def hidden(self, *purposes: Purpose, tag: str | None = None) -> list[Hidden]:
        """Names of directories that are no finished checkpoints, of these purposes."""
        names = (Hidden.parse(path.name) for path in self._entries())
        return [name for name in names if name and name.purpose in purposes and tag in (None, name.tag)]

    def _entries(self) -> Iterator[Path]:
        if not self.root.is_dir():
            return
        try:
            yield from sorted(self.root.iterdir())
        except OSError as error:
            raise failure(self.root, "read", error) from error

    def _name_one(self) -> str:
        tags = self.tags()
        return f"Name one of: {', '.join(tags)}" if tags else "Save one first, with engine.save(path)"

    def _no_latest(self) -> CheckpointError:
        if finished(self.root):
            return CheckpointError(
                f"Checkpoint directory '{self.root}'",
                why="it is a checkpoint itself, not the directory that holds them",
                fix=f"Give '{self.root.parent}' and tag='{self.root.name}'",
            )
        halves = sorted({name.tag for name in self.hidden("tmp") if (self.root / str(name)).is_dir()})
        left = f", only half-written {', '.join(halves)}" if halves and not self.tags() else ""
        return CheckpointError(
            f"Checkpoint directory '{self.root}'", why=f"it has no file '{LATEST}'{left}", fix=self._name_one()
        )

    def _not_loadable(self, tag: str, path: Path, *, newest: bool) -> CheckpointError:
        named = f", which its file '{LATEST}' names" if newest else ""
        given = f"Checkpoint '{tag}' in '{self.root}'{named}"
        if path.is_dir():
            return CheckpointError(given, why=f"it was not finished: {MANIFEST} is missing", fix=self._name_one())
        if any(self.hidden("tmp", tag=tag)):
            return CheckpointError(given, why="its save was interrupted, or is still running", fix=self._name_one())
        close = nearest(tag, self.tags())
        fix = (f"Did you mean '{close}'? " if close else "") + self._name_one()
        return CheckpointError(given, why="there is none of that name", fix=fix)


def finished(path: Path) -> bool:
    """Whether ``path`` holds a checkpoint that was written to its end."""
    return (path / MANIFEST).is_file()


def _natural(name: str) -> list[tuple[int, int, str]]:
    parts = re.split(r"(\d+)", name)
    return [(1, int(part), "") if part.isdecimal() else (0, 0, part) for part in parts]
