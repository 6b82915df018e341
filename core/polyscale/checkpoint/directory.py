"""CheckpointDirectory: how checkpoints lie in a directory, and how one is replaced so that a crash loses nothing.

::

    root/latest             the newest tag, one line
    root/<tag>/             a finished checkpoint: manifest.json, tensors/, and what the engine adds
    root/.<tag>.tmp-<id>/   being written
    root/.<tag>.old-<id>/   moved aside while its successor takes its name

Notable: a checkpoint is written under a temporary name, fsynced, and renamed; only then does ``latest`` name it. With
``overwrite`` the old one is moved aside first; for the instant in which neither has the name, ``resolve`` finds the
old one aside, and the next ``begin`` moves it back. The order of a save (rank 0 unless said otherwise)::

    tmp = directory.begin(tag, overwrite=...)      # the path is broadcast
    ... every rank writes below tmp, and all agree that it worked ...
    directory.commit(tmp, tag, overwrite)          # or directory.abort(tmp)

Imports no torch.
"""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from os import PathLike
from pathlib import Path

from polyscale.checkpoint.durable import fsync_directory, fsync_tree, make_directory, write_bytes
from polyscale.checkpoint.faults import failure
from polyscale.checkpoint.names import LATEST, MANIFEST, TENSORS, Hidden, Purpose, check_tag
from polyscale.errors import CheckpointError, nearest

_log = logging.getLogger("polyscale")


class CheckpointDirectory:
    """The checkpoints in one directory.

    Args:
        root: the directory; made by the first ``begin``.
    """

    def __init__(self, root: str | PathLike[str]) -> None:
        self.root = Path(root)

    def path(self, tag: str) -> Path:
        """Where the finished checkpoint ``tag`` lies, or would lie."""
        return self.root / check_tag(tag)

    def tags(self) -> list[str]:
        """Finished checkpoints that can be loaded, numbers in them in numeric order."""
        found = {path.name for path in self._entries() if not path.name.startswith(".") and _finished(path)}
        found |= {hidden.tag for hidden in self._hidden("old")}
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
            return check_tag(text)
        except CheckpointError as error:
            raise CheckpointError(
                f"{self.root / LATEST} says {text[:80]!r}", why=error.why, fix=self._name_one()
            ) from None

    def begin(self, tag: str, *, overwrite: bool = False) -> Path:
        """Make the temporary directory of a new checkpoint, with ``tensors/`` in it. Rank 0 only.

        Also cleans up after processes that died (``clean_stale``).

        Raises:
            CheckpointError: ``tag`` is no tag, or exists and ``overwrite`` is False, or the system refuses.
        """
        target = self.path(tag)
        tmp = self.root / str(Hidden.mine(tag, "tmp"))
        with _reported(self.root, "written"):
            make_directory(self.root)
            self.clean_stale()
            self._check_free(target, tag, overwrite)
            (tmp / TENSORS).mkdir(parents=True)
        return tmp

    def commit(self, tmp: Path, tag: str, overwrite: bool = False) -> None:
        """Make the written ``tmp`` the checkpoint ``tag``, and the newest. Rank 0 only, after all ranks wrote.

        Raises:
            CheckpointError: the manifest is missing, ``tag`` exists and ``overwrite`` is False, or the system refuses;
                the checkpoints that were there stand.
        """
        target = self.path(tag)
        if not _finished(tmp):
            raise CheckpointError(f"{tmp} cannot become '{tag}'", why=f"it has no {MANIFEST}", fix="Write it first")
        with _reported(target, "written"):
            self._check_free(target, tag, overwrite)
            fsync_tree(tmp)
            newest = self.root / str(Hidden.mine(LATEST, "tmp"))
            write_bytes(newest, f"{tag}\n".encode())  # before any rename: a full disk must show here
            try:
                self._take_name(tmp, target, tag)
                newest.replace(self.root / LATEST)
            except BaseException:
                newest.unlink(missing_ok=True)
                raise
            fsync_directory(self.root)
        for replaced in self._hidden("old", tag=tag):
            self._remove(self.root / str(replaced))

    def abort(self, tmp: Path) -> None:
        """Remove a temporary directory, whatever is in it; never raises for what is already gone."""
        hidden = Hidden.parse(tmp.name)
        if hidden is None or hidden.purpose != "tmp" or tmp.parent != self.root:
            raise CheckpointError(f"{tmp} cannot be aborted", why=f"it is no temporary directory of {self.root}")
        shutil.rmtree(tmp, ignore_errors=True)

    def resolve(self, tag: str | None = None) -> Path:
        """Where to load from: ``tag``, or the newest when None. Any rank; changes nothing.

        Raises:
            CheckpointError: no such directory, no ``latest``, no such tag, or one that was not finished.
        """
        if not self.root.is_dir():
            why = "it is a file" if self.root.exists() else "there is no such directory"
            raise CheckpointError(f"Checkpoint directory '{self.root}'", why=why, fix="Check the path")
        if tag is None:
            tag = self.latest()
        path = self.path(tag)
        if _finished(path):
            return path
        for hidden in self._hidden("old", tag=tag):
            _log.warning("%s: its replacement was interrupted; the replaced one is used", path)
            return self.root / str(hidden)
        raise self._not_loadable(tag, path)

    def clean_stale(self) -> None:
        """Remove what processes of this host left when they died; move a checkpoint left aside back to its name."""
        for hidden in self._hidden("tmp", "old", "trash"):
            if not hidden.abandoned:
                continue
            path = self.root / str(hidden)
            with _reported(self.root, "cleaned up"), suppress(FileNotFoundError):
                if hidden.purpose == "old" and not (self.root / hidden.tag).exists():
                    path.rename(self.root / hidden.tag)
                    fsync_directory(self.root)
                    _log.warning("Moved checkpoint '%s' back: its replacement was interrupted", hidden.tag)
                else:
                    self._remove(path)

    def _check_free(self, target: Path, tag: str, overwrite: bool) -> None:
        if target.exists() and not target.is_dir():
            raise CheckpointError(f"Tag '{tag}'", why=f"{target} is a file", fix="Use another tag")
        if overwrite:
            return
        if target.exists() or any(self._hidden("old", tag=tag)):
            raise CheckpointError(
                f"Tag '{tag}'", why=f"{target} exists", fix="Use another tag, or overwrite=True to replace it"
            )

    def _take_name(self, tmp: Path, target: Path, tag: str) -> None:
        aside = self._move_aside(target, tag)
        try:
            tmp.rename(target)
        except BaseException:
            if aside is not None:
                aside.rename(target)
            raise
        fsync_directory(self.root)
        if aside is not None and not aside.name.startswith(f".{tag}.old-"):
            self._remove(aside)

    def _move_aside(self, target: Path, tag: str) -> Path | None:
        if not target.exists():
            return None
        purpose: Purpose = "old" if _finished(target) else "trash"  # half a checkpoint is nothing to come back to
        aside = self.root / str(Hidden.mine(tag, purpose))
        target.rename(aside)
        return aside

    def _remove(self, path: Path) -> None:
        """Remove a directory, or file, that nobody needs. A name that can be loaded is given up first."""
        hidden = Hidden.parse(path.name)
        try:
            if hidden is not None and hidden.purpose == "old":
                trash = self.root / str(Hidden.mine(hidden.tag, "trash"))
                path.rename(trash)
                path = trash
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
        except OSError as error:
            _log.warning("Cannot remove %s: %s", path, error.strerror)

    def _entries(self) -> Iterator[Path]:
        if not self.root.is_dir():
            return
        try:
            yield from sorted(self.root.iterdir())
        except OSError as error:
            raise failure(self.root, "read", error) from error

    def _hidden(self, *purposes: Purpose, tag: str | None = None) -> list[Hidden]:
        names = (Hidden.parse(path.name) for path in self._entries())
        return [name for name in names if name and name.purpose in purposes and tag in (None, name.tag)]

    def _name_one(self) -> str:
        tags = self.tags()
        return f"Name one of: {', '.join(tags)}" if tags else "Save one first, with engine.save(path)"

    def _no_latest(self) -> CheckpointError:
        if _finished(self.root):
            return CheckpointError(
                f"Checkpoint directory '{self.root}'",
                why="it is a checkpoint itself, not the directory that holds them",
                fix=f"Give '{self.root.parent}' and tag='{self.root.name}'",
            )
        halves = sorted({name.tag for name in self._hidden("tmp") if (self.root / str(name)).is_dir()})
        left = f", only half-written {', '.join(halves)}" if halves and not self.tags() else ""
        return CheckpointError(
            f"Checkpoint directory '{self.root}'", why=f"it has no file '{LATEST}'{left}", fix=self._name_one()
        )

    def _not_loadable(self, tag: str, path: Path) -> CheckpointError:
        given = f"Checkpoint '{tag}' in '{self.root}'"
        if path.is_dir():
            return CheckpointError(given, why=f"it was not finished: {MANIFEST} is missing", fix=self._name_one())
        if any(self._hidden("tmp", tag=tag)):
            return CheckpointError(given, why="its save was interrupted, or is still running", fix=self._name_one())
        close = nearest(tag, self.tags())
        fix = (f"Did you mean '{close}'? " if close else "") + self._name_one()
        return CheckpointError(given, why="there is none of that name", fix=fix)


def _finished(path: Path) -> bool:
    return (path / MANIFEST).is_file()


def _natural(name: str) -> list[tuple[int, int, str]]:
    parts = re.split(r"(\d+)", name)
    return [(1, int(part), "") if part.isdecimal() else (0, 0, part) for part in parts]


@contextmanager
def _reported(path: Path, doing: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise failure(path, doing, error) from error
