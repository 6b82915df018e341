"""Runs a step that may fail on some ranks, and makes all of them raise when one does.

Notable: whatever the step raises is told to the others, a user's own exception too, because a rank that left in silence
would be waited for. The rank that failed raises what it caught; the others raise an error that names it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

from polyscale.checkpoint.faults import advice, cause
from polyscale.control.agreement import Control
from polyscale.errors import CheckpointError, PolyscaleError

Result = TypeVar("Result")


def together(control: Control, name: str, call: Callable[[], Result], *, what: str) -> Result:
    """Run ``call`` on every rank; return this rank's result when it succeeded on all of them. Collective.

    Args:
        control: what ranks share.
        name: which step this is; all ranks use the same.
        call: the step; it must not be collective itself.
        what: the call of the user that the step is part of, for errors ("save of 'a'").

    Raises:
        Exception: this rank's own; an OSError becomes a CheckpointError.
        CheckpointError: another rank failed; names it and its cause.
    """
    own: Exception | None = None
    result: Result | None = None
    try:
        result = call()
    except Exception as error:
        own = error
    told = control.share(name, None if own is None else _parts(own, what), what=what)
    if own is not None:
        raise _raised(own, what)
    for rank, parts in enumerate(told):
        if parts is not None:
            raise _of_rank(rank, parts)
    return cast(Result, result)


def on_first(control: Control, name: str, call: Callable[[], Result], *, what: str) -> Result:
    """Run ``call`` on rank 0 only; return its result, which must be JSON-able, on every rank. Collective.

    Raises:
        Exception: on rank 0, what ``call`` raised; an OSError becomes a CheckpointError.
        CheckpointError: on the other ranks; names rank 0 and its cause.
    """
    own: Exception | None = None
    answer: dict[str, Any] | None = None
    if control.rank == 0:
        try:
            answer = {"result": call()}
        except Exception as error:
            own = error
            answer = {"failure": _parts(own, what)}
    answer = cast("dict[str, Any]", control.decide(name, answer, what=what))
    if own is not None:
        raise _raised(own, what)
    if "failure" in answer:
        raise _of_rank(0, answer["failure"])
    return cast(Result, answer["result"])


def _parts(error: Exception, what: str) -> list[str]:
    if isinstance(error, PolyscaleError):
        return [error.given, error.why, error.fix]
    return [f"{what} failed", cause(error), advice(error)]


def _raised(error: Exception, what: str) -> Exception:
    if not isinstance(error, OSError):
        return error
    given, why, fix = _parts(error, what)
    found = CheckpointError(given, why=why, fix=fix)
    found.__cause__ = error
    return found


def _of_rank(rank: int, parts: list[str]) -> CheckpointError:
    given, why, fix = parts
    return CheckpointError(f"Rank {rank}: {given}", why=why, fix=fix)
