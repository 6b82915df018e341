"""What is wrong with a configuration, and what in it has no effect: all at once, without a model or a device.

Notable: what ``scale config check`` prints. Nothing is raised for a mistake in the configuration.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from polyscale.config.auto import unresolved_error
from polyscale.config.config import Config
from polyscale.config.errors import BatchError, UnresolvedAutoError, each
from polyscale.config.load import Readable, examine
from polyscale.config.rules import scheduler_alone
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
    own_optimizer: bool = False,
) -> list[Problem]:
    """Return errors, then notes; an empty list says that all is well.

    Args:
        source: as ``load_config`` takes it.
        honoured: dotted keys that the plugins to be used honour; others that need a plugin are errors.
        plugins: names of the installed plugins; when given, options for others are errors.
        dp_world: data-parallel ranks; when given, the batch numbers must multiply on them.
        own_optimizer: whether an optimizer is passed to ``initialize``, so that none need be configured.
    """
    try:
        config, errors = examine(source)
    except PolyscaleError as error:
        return as_problems([error])
    return review(
        config, errors, honoured=honoured, plugins=plugins, dp_world=dp_world, own_optimizer=own_optimizer
    ) + notes(config, honoured)


def review(
    config: Config,
    errors: Sequence[PolyscaleError],
    *,
    honoured: frozenset[str] = frozenset(),
    plugins: frozenset[str] | None = None,
    dp_world: int | None = None,
    own_optimizer: bool = False,
) -> list[Problem]:
    """Return the errors of an examined configuration, one for each key.

    Args:
        config: what ``examine`` made of it.
        errors: what ``examine`` found wrong.
        honoured: as for ``check``, as the rest.
        plugins: as for ``check``.
        dp_world: as for ``check``.
        own_optimizer: as for ``check``.
    """
    problems = as_problems(errors)
    problems += _of(lambda: config.require(honoured, plugins=plugins))
    if dp_world is not None and not any(isinstance(problem.error, BatchError) for problem in problems):
        problems += _of(lambda: config.batch(dp_world))
    alone = scheduler_alone(config)
    if alone is not None and not own_optimizer and not any(one.key.startswith("optimizer") for one in problems):
        problems += as_problems([alone])
    return problems


def notes(config: Config, honoured: frozenset[str] = frozenset()) -> list[Problem]:
    """Return what in ``config`` has no effect here, less what is ``honoured``."""
    found = config.notes(honoured)
    return [Problem("note", note.key, f"{note.key} has no effect here: {note.reason}.") for note in found]


def as_problems(errors: Iterable[PolyscaleError]) -> list[Problem]:
    """Return a problem for each mistake in ``errors``, for each key where nothing can tell an "auto"."""
    single: list[PolyscaleError] = []
    for error in (part for given in errors for part in each(given)):
        paths = error.paths if isinstance(error, UnresolvedAutoError) else ()
        single += [unresolved_error([path]) for path in paths] or [error]
    return [Problem("error", _key(one.given), str(one), one) for one in single]


def _of(call: Callable[[], object]) -> list[Problem]:
    try:
        call()
    except PolyscaleError as error:
        return as_problems([error])
    return []


def _key(given: str) -> str:
    """Return the path that an error starts with ("fp16.enabled = 3", "Unknown key zero.stge")."""
    first = re.split(r"[ =]", given.removeprefix("Unknown key ").removeprefix("Key "))[0].rstrip(",:")
    return first if first[:1].islower() else ""
