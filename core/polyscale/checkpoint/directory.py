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
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from polyscale.checkpoint.durable import fsync_directory, fsync_tree, make_directory, write_bytes
from polyscale.checkpoint.faults import failure
from polyscale.checkpoint.finding import CheckpointFinder, finished
from polyscale.checkpoint.names import LATEST, MANIFEST, TENSORS, Hidden, Purpose, check_tag
from polyscale.errors import CheckpointError

_log = logging.getLogger("polyscale")


class CheckpointDirectory(CheckpointFinder):
    """The checkpoints in one directory, for reading and writing.

    Args:
        root: the directory; made by the first ``begin``.
    """

    def begin(self, tag: str, *, overwrite: bool = False) -> Path:
        """Make the temporary directory of a new checkpoint, with ``tensors/`` in it. Rank 0 only.

        Also cleans up after processes that died (``clean_stale``).

        Raises:
            CheckpointError: ``tag`` is no tag, or exists and ``overwrite`` is False, or the system refuses.
        """
        target = self.path(check_tag(tag))
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
        if not finished(tmp):
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
        for replaced in self.hidden("old", tag=tag):
            self._remove(self.root / str(replaced))

    def abort(self, tmp: Path) -> None:
        """Remove a temporary directory, whatever is in it; never raises for what is already gone."""
        hidden = Hidden.parse(tmp.name)
        if hidden is None or hidden.purpose != "tmp" or tmp.parent != self.root:
            raise CheckpointError(f"{tmp} cannot be aborted", why=f"it is no temporary directory of {self.root}")
        shutil.rmtree(tmp, ignore_errors=True)

    def clean_stale(self) -> None:
        """Remove what processes of this host left when they died; move a checkpoint left aside back to its name."""
        for hidden in self.hidden("tmp", "old", "trash"):
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
        if target.exists() or any(self.hidden("old", tag=tag)):
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
        purpose: Purpose = "old" if finished(target) else "trash"  # half a checkpoint is nothing to come back to
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


@contextmanager
def _reported(path: Path, doing: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise failure(path, doing, error) from error
