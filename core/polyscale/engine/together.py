"""Runs a step that may fail on some ranks, and makes all of them raise when one does."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from polyscale.control.agreement import Control
from polyscale.errors import CheckpointError, PolyscaleError

Result = TypeVar("Result")


def together(control: Control, name: str, call: Callable[[], Result], *, what: str) -> Result:
    """Run ``call`` on this rank; return its result when it succeeded on every rank. Collective.

    Raises:
        PolyscaleError: this rank's own error, or one that names the rank that failed.
    """
    own: PolyscaleError | None = None
    result: Result | None = None
    try:
        result = call()
    except PolyscaleError as error:
        own = error
    except OSError as error:
        own = CheckpointError(
            f"{what} failed: {error}", why="the file system refused", fix="Free space or check rights"
        )
    told = control.share(name, None if own is None else [own.given, own.why, own.fix], what=what)
    if own is not None:
        raise own
    for rank, parts in enumerate(told):
        if parts is not None:
            given, why, fix = parts
            raise CheckpointError(f"Rank {rank}: {given}", why=why, fix=fix)
    return result  # type: ignore[return-value]
