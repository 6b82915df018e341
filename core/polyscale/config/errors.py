"""The errors of a configuration, one class per kind of mistake: a caller can tell a typo from a missing feature."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from polyscale.errors import ConfigError, PolyscaleError


class SourceError(ConfigError):
    """The configuration cannot be read: no such file, not JSON, a key twice."""


class UnknownKeyError(ConfigError):
    """A key that nobody knows."""


class WrongValueError(ConfigError):
    """A known key whose value has the wrong type or range, or contradicts another."""


class NotBuiltError(ConfigError):
    """A known key that asks for something that is not built yet, or that no chosen plugin does."""


class UnresolvedAutoError(ConfigError):
    """``"auto"`` where nothing here can tell the value; ``paths`` has the keys."""

    paths: tuple[str, ...] = ()


class BatchError(ConfigError):
    """The batch numbers do not multiply."""


ConfigErrors = list[ConfigError]


class SeveralConfigErrors(ConfigError):
    """More than one mistake; ``errors`` has each."""

    def __init__(self, given: str, *, errors: Sequence[PolyscaleError]) -> None:
        self.errors = tuple(errors)
        self._source = given
        listed = " ".join(f"({number}) {error}" for number, error in enumerate(errors, start=1))
        super().__init__(f"{len(errors)} problems in {given}", why=listed)

    def __reduce__(self) -> tuple[Any, ...]:
        return _several, (self._source, self.errors)


def _several(source: str, errors: Sequence[PolyscaleError]) -> SeveralConfigErrors:
    return SeveralConfigErrors(source, errors=errors)


def each(error: PolyscaleError) -> tuple[PolyscaleError, ...]:
    """Return the mistakes that ``error`` holds; itself where it is about one."""
    return error.errors if isinstance(error, SeveralConfigErrors) else (error,)


def raise_all(errors: Sequence[PolyscaleError], source: str) -> None:
    """Raise the one error, or all of them as one; nothing when there is none."""
    if len(errors) == 1:
        raise errors[0]
    if errors:
        raise SeveralConfigErrors(source, errors=errors)
