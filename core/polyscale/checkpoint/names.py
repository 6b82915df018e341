"""Names inside a checkpoint root: tags, temporary directories, and which process a temporary directory belongs to.

Notable: everything that is not a finished checkpoint begins with a dot and carries its owner, so a directory left by a
killed process is told from one that is being written now, also when the process number was given to another process
(its start time is part of the name), and never by its age. A process in another container or on another host cannot
be seen from here; what it left is kept.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from polyscale.errors import CheckpointError

MANIFEST = "manifest.json"
TENSORS = "tensors"
LATEST = "latest"

Purpose = Literal["tmp", "old", "trash"]

_HIDDEN = re.compile(
    r"\.(?P<tag>.+)\.(?P<purpose>tmp|old|trash)-(?P<host>[0-9a-f]{8})-(?P<pid>\d+)-(?P<start>\d+)-(?P<nonce>[0-9a-f]{6})"
)
_MAX_TAG_BYTES = 160


_FIX = "Use letters (a-z, A-Z), digits, '-', '_' and '.', neither first nor last a '.', such as 'step100'"


def check_tag(tag: object) -> str:
    """Return ``tag`` when a checkpoint may be saved under it: any file system can hold a directory of that name.

    Raises:
        CheckpointError: as ``check_name``; or it holds other characters than ASCII letters, digits, "-", "_" and ".",
            or ends with ".".
    """
    name = check_name(tag)
    other = sorted(set(re.sub(r"[A-Za-z0-9._-]", "", name)))
    why = f"it holds {', '.join(map(repr, other))}" if other else "it ends with '.'" if name.endswith(".") else ""
    if why:
        raise CheckpointError(f"Tag {tag!r}", why=f"{why}, which not every file system can store", fix=_FIX)
    return name


def check_name(tag: object) -> str:
    """Return ``tag`` when it can be the name of a directory below the root, so that what is there can be loaded.

    Raises:
        CheckpointError: it is no string, empty, too long, begins with ".", holds a separator or an unprintable
            character, or is "latest".
    """
    if not isinstance(tag, str):
        raise CheckpointError(f"Tag {tag!r}", why=f"it is a {type(tag).__name__}, not a string", fix=_FIX)
    why = ""
    if not tag.strip():
        why = "it is empty"
    elif tag.startswith("."):
        why = "names that begin with '.' are temporary directories"
    elif any(separator in tag for separator in ("/", "\\")):
        why = "it holds a separator of paths"
    elif not tag.isprintable():
        why = "it holds a character that cannot be printed"
    elif tag == LATEST:
        why = f"the file '{LATEST}' says which checkpoint is the newest"
    elif len(os.fsencode(tag)) > _MAX_TAG_BYTES:
        why = f"it is longer than {_MAX_TAG_BYTES} bytes"
    if why:
        raise CheckpointError(f"Tag {tag!r}", why=why, fix=_FIX)
    return tag


@dataclass(frozen=True)
class Hidden:
    """The name of a directory that is not a finished checkpoint.

    Attributes:
        tag: the checkpoint it belongs to.
        purpose: "tmp", being written; "old", moved aside while its successor takes its name; "trash", being removed.
        host: digest of host name and process namespace.
        pid: the owner's process number.
        start: the owner's start time in clock ticks since boot; 0 where the system does not tell.
        nonce: makes the name unique.
    """

    tag: str
    purpose: Purpose
    host: str
    pid: int
    start: int
    nonce: str

    @classmethod
    def mine(cls, tag: str, purpose: Purpose) -> Hidden:
        """A new name that belongs to this process."""
        pid = os.getpid()
        return cls(tag, purpose, _host(), pid, _start_time(pid) or 0, secrets.token_hex(3))

    @classmethod
    def parse(cls, name: str) -> Hidden | None:
        """Read a name; None when it is no such name."""
        found = _HIDDEN.fullmatch(name)
        if found is None:
            return None
        purpose: Purpose = found["purpose"]  # type: ignore[assignment]
        return cls(found["tag"], purpose, found["host"], int(found["pid"]), int(found["start"]), found["nonce"])

    def __str__(self) -> str:
        return f".{self.tag}.{self.purpose}-{self.host}-{self.pid}-{self.start}-{self.nonce}"

    @property
    def abandoned(self) -> bool:
        """Whether its owner ran here and is gone. False when that cannot be known."""
        if self.host != _host():
            return False
        if Path("/proc/self/stat").exists():
            return _start_time(self.pid) != self.start
        return os.name == "posix" and not _alive(self.pid)


def _host() -> str:
    try:
        namespace = str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        namespace = ""
    return hashlib.sha256(f"{socket.gethostname()} {namespace}".encode()).hexdigest()[:8]


def _start_time(pid: int) -> int | None:
    """Start time of a process in clock ticks since boot (proc(5), field 22); None when there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # the command name may hold spaces and brackets
    return None if fields[0] in ("Z", "X") else int(fields[19])


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
