"""What went wrong below a checkpoint, in words: the operating system's reason instead of the layers above it.

Notable: ``torch.save`` hides a full disk behind a complaint of its zip writer, so the chain of exceptions is searched
for the ``OSError`` that began it.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from os import PathLike, fspath

from polyscale.errors import CheckpointError

_ADVICE = {
    errno.ENOSPC: "Free space there, or save to another file system",
    getattr(errno, "EDQUOT", errno.ENOSPC): "Free space in your quota, or save to another file system",
    errno.EFBIG: "Raise the limit on file sizes (ulimit -f), or save to another file system",
    errno.EACCES: "Give this user the right to it, or choose another directory",
    errno.EPERM: "Give this user the right to it, or choose another directory",
    errno.EROFS: "Choose a directory on a file system that can be written",
    errno.ENOENT: "Check the path; on several hosts it must be on a file system that all of them share",
}


def cause(error: BaseException) -> str:
    """Say in one line why ``error`` was raised: the ``OSError`` at its root where there is one."""
    system = _system_error(error)
    if system is not None:
        where = f" ({system.filename})" if system.filename else ""
        return f"{system.strerror or system}{where}"
    if isinstance(error, CheckpointError):
        return str(CheckpointError(error.given, why=error.why))
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def advice(error: BaseException) -> str:
    """Say what to do about ``error``; "" when there is nothing better than its cause."""
    system = _system_error(error)
    if system is not None:
        return _ADVICE.get(system.errno or 0, "")
    return error.fix if isinstance(error, CheckpointError) else ""


def failure(path: str | PathLike[str], doing: str, error: BaseException) -> CheckpointError:
    """Make the error for ``path`` that could not be ``doing`` ("written", "read")."""
    if isinstance(error, CheckpointError):
        return error
    return CheckpointError(f"{fspath(path)} cannot be {doing}", why=cause(error), fix=advice(error))


def _system_error(error: BaseException) -> OSError | None:
    for link in _chain(error):
        if isinstance(link, OSError) and link.errno is not None:
            return link
    return None


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or link.__context__
