"""What is wrong with a configuration, and what in it has no effect: all at once, without a model or a device.

Notable: what ``scale config check`` prints. Nothing is raised for a mistake in the configuration.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from polyscale.config.errors import SeveralConfigErrors
from polyscale.config.load import Readable, load_config
from polyscale.errors import PolyscaleError


@dataclass(frozen=True)
class Problem:
    """One remark.

    Attributes:
        kind: "error" (it cannot be used) or "note" (it is harmless).
        key: dotted path of the key, "" where the remark is about the whole.
        text: the remark, complete.
        error: the error behind it, with given, why and fix.
    """

    kind: Literal["error", "note"]
    key: str
    text: str
    error: PolyscaleError | None = None


def check(
    source: Readable,
    *,
    honoured: frozenset[str] = frozenset(),
    plugins: frozenset[str] | None = None,
    dp_world: int | None = None,
) -> list[Problem]:
    """Return errors, then notes; an empty list says that all is well.

    Args:
        source: as ``load_config`` takes it.
        honoured: dotted keys that the plugins to be used honour; others that need a plugin are errors.
        plugins: names of the installed plugins; when given, options for others are errors.
        dp_world: data-parallel ranks; when given, the batch numbers must multiply on them.
    """
    try:
        config = load_config(source)
    except PolyscaleError as error:
        return _problems(error)
    problems = []
    try:
        config.require(honoured, plugins=plugins)
    except PolyscaleError as error:
        problems += _problems(error)
    try:
        if dp_world is not None:
            config.batch(dp_world)
    except PolyscaleError as error:
        problems += _problems(error)
    notes = config.notes(honoured)
    return problems + [Problem("note", note.key, f"{note.key} has no effect here: {note.reason}.") for note in notes]


def _problems(error: PolyscaleError) -> list[Problem]:
    errors = error.errors if isinstance(error, SeveralConfigErrors) else (error,)
    return [Problem("error", _key(one.given), str(one), one) for one in errors]


def _key(given: str) -> str:
    """Return the path that an error starts with ("fp16.enabled = 3", "Unknown key zero.stge")."""
    first = given.removeprefix("Unknown key ").removeprefix("Key ").split(" ")[0].rstrip(",:")
    return first if first[:1].islower() else ""
