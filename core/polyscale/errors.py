"""Errors that tell a user what was given, why it cannot work, and what to do instead.

Notable: the three parts are attributes, so a command line, a notebook and a log can each lay them out; ``str()`` joins
them as "given: why. Fix.". Anything that a user can cause is one of these; ``assert`` is kept for our own invariants.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from polyscale.engine.holders import MemoryReport


class PolyscaleError(Exception):
    """Base of all errors that polyscale raises on purpose.

    Args:
        given: what was given, with its value ("train_batch_size 7").
        why: why that cannot work.
        fix: what is valid, or the command to run.
    """

    def __init__(self, given: str, *, why: str = "", fix: str = "") -> None:
        self.given = given
        self.why = why
        self.fix = fix
        super().__init__(str(self))

    def __reduce__(self) -> tuple[Any, ...]:
        """Errors cross process boundaries: the parts are keywords, which pickle does not know by itself."""
        return _rebuild, (type(self), self.given, self.why, self.fix)

    def __str__(self) -> str:
        given, why, fix = (part.strip() for part in (self.given, self.why, self.fix))
        if why:
            given = f"{given.rstrip('.:')}: {why}"
        return " ".join(_sentence(part) for part in (given, fix) if part)


class ConfigError(PolyscaleError):
    """The configuration cannot be used."""


class PluginError(PolyscaleError):
    """A plugin is missing, broken, ambiguous, or of another interface version."""


class UnsupportedError(PolyscaleError):
    """A real request that this backend or device cannot do, and says so before anything is allocated."""


class CheckpointError(PolyscaleError):
    """A checkpoint cannot be written, read, or does not belong to this model."""


class OutOfMemoryError(PolyscaleError):
    """A device, or the host, has not enough memory left. What an engine raises is a ``torch.OutOfMemoryError`` too.

    Attributes:
        report: what was asked for, what is in use and by what, in bytes; None where nothing was measured.
    """

    report: MemoryReport | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """As for every error, and what was measured."""
        return (*super().__reduce__(), {"report": self.report})


class RankError(PolyscaleError):
    """Ranks disagree, or a rank is missing, failed, or did not come in time."""


class BuildError(PolyscaleError):
    """A kernel module cannot be built or loaded; where an op has a reference, that runs instead."""


def nearest(name: str, valid: Iterable[str]) -> str | None:
    """Return the entry of ``valid`` closest in spelling to ``name``, or None when nothing is close."""
    by_lower = {entry.lower(): entry for entry in valid}
    found = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.6)
    return by_lower[found[0]] if found else None


def _rebuild(kind: type[PolyscaleError], given: str, why: str, fix: str) -> PolyscaleError:
    return kind(given, why=why, fix=fix)


def _sentence(text: str) -> str:
    return text if text.endswith((".", "!", "?", ":")) else text + "."
