"""What is said to a rank whose collective cannot complete: because another rank is lost, has left, or calls another."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from polyscale import env
from polyscale.control.events import Event
from polyscale.control.waits import Seen
from polyscale.errors import RankError

_SHOWN = 4
MISMATCH = (
    "Ranks that make different calls wait for one another: a forward, an evaluation, a save or a get_full on one rank "
    "only, or a step more than the others"
)
SAME_CALLS = "Make the same calls in the same order on every rank"


def lost(rank: int, doing: str, causes: Sequence[Event]) -> RankError:
    """Another rank has failed, or is gone."""
    return RankError(
        f"rank {rank} has lost rank {causes[0].rank} while it was {doing}",
        why="; ".join(map(str, causes[:3])),
        fix=f"Look at what rank {causes[0].rank} printed",
    )


def left(rank: int, doing: str, events: Sequence[Event]) -> RankError:
    """Another rank has ended without an error."""
    return RankError(
        f"rank {rank} waits {doing} for rank {events[0].rank}, which has left",
        why="; ".join(map(str, events[:3])),
        fix="Let every rank do the same number of steps, and find out why that one ended earlier",
    )


def ended(what: str, rank: int, events: Sequence[Event]) -> RankError:
    """An agreement to which ranks do not come, because their processes have ended in order."""
    return RankError(
        f"{what}: rank {events[0].rank} does not come, and rank {rank} waited for it",
        why="; ".join(map(str, events[:3])),
        fix="Let every rank do the same number of steps, and find out why that one ended earlier",
    )


def out_of_time(rank: int, doing: str, seconds: float | None, others: Mapping[int, str]) -> RankError:
    """A collective did not complete in time, though every rank is there.

    Args:
        rank: this rank.
        doing: where it waited.
        seconds: how long, where that is known.
        others: rank -> where it was last seen.
    """
    time = "" if seconds is None else f" for {seconds:g} s"
    seen = [f"rank {other} was last seen {where}" for other, where in list(others.items())[:_SHOWN]]
    if len(others) > _SHOWN:
        seen.append(f"and so on for {len(others) - _SHOWN} more")
    return RankError(
        f"rank {rank} waited for the others{time} {doing}",
        why="; ".join([*seen, MISMATCH] if seen else [MISMATCH]),
        fix=f"{SAME_CALLS}; where one is only slow, set {env.TIMEOUT} to more seconds",
    )


def stuck(seen: Mapping[int, Seen]) -> list[str]:
    """Lines about ranks that wait for one another."""
    lines = [f"rank {rank} has waited for {one.waited:.0f} s {one}" for rank, one in sorted(seen.items())]
    hidden = len(lines) - 2 * _SHOWN
    return [
        *lines[: 2 * _SHOWN],
        *([f"and so on for {hidden} more"] if hidden > 0 else []),
        f"{MISMATCH}. {SAME_CALLS}.",
    ]


def seconds_waited(*texts: str) -> float | None:
    """How long a collective waited, by the words of an error ("12000ms", "Timeout(ms)=600000"); None if none says."""
    text = "\n".join(texts)
    found = re.search(r"\(ms\)=(\d+)", text) or re.search(r"(\d+) ?(?:ms|milliseconds)\b", text)
    return int(found[1]) / 1000 if found else None
