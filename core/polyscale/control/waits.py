"""Ranks that wait for one another: what each says about itself, and when it is certain that none can go on.

Notable: ending a run that would have gone on is far worse than waiting for a time-out. So the early end needs all of
this at once, for every rank: one host without an accelerator, and gloo, so that only a wait costs no processor time
and no network can be slow; the thread is inside a call of torch.distributed (not in a disk, a debugger or a request);
it is in a phase of the engine, and not one that waits for a disk; the process has neither computed nor changed its
place for long; and it still says so. The places must differ: ranks that have all come to the same call are about to go
on.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass

_COMPUTES = 0.03  # share of one core, but for the watchdog's thread; gloo's threads take up to 1 % while they wait
LATE_S = 5.0  # a look that comes so late was held up itself (a stopped or starved process): begin anew


@dataclass(frozen=True)
class Seen:
    """What a rank's watchdog says about it with every beat.

    Attributes:
        beats: counts up: two different ones are a sign of life.
        doing: phase, module and steps done, in words.
        line: the line of the user's code.
        where: phase, detail and steps done.
        waited: seconds in which the rank has only waited for others, at this place; 0.0 where that is not certain.
    """

    beats: int
    doing: str
    line: str = ""
    where: tuple[str, str, int] = ("", "", 0)
    waited: float = 0.0

    def text(self) -> str:
        """As it stands in the store."""
        return json.dumps(asdict(self))

    @staticmethod
    def read(text: str) -> Seen:
        """What ``text()`` gave."""
        fields = json.loads(text)
        phase, detail, step = fields.pop("where")
        return Seen(**fields, where=(phase, detail, step))

    def __str__(self) -> str:
        return self.doing + (f" at {self.line}" if self.line else "")


class WaitClock:
    """Seconds for which a process has done nothing but wait, at one place."""

    def __init__(self) -> None:
        self._where: object = None
        self._since = self._looked = self._used = 0.0

    def waited(self, where: object, *, now: float, used: float, waits: bool) -> float:
        """Look once.

        Args:
            where: any change of it is progress.
            now: monotonic seconds.
            used: processor seconds of the process so far.
            waits: whether the thread is now seen to wait.
        """
        passed = now - self._looked
        worked = used - self._used > _COMPUTES * passed
        self._looked, self._used = now, used
        if where != self._where or worked or not waits or passed > LATE_S:
            self._where, self._since = where, now
        return now - self._since


def hopeless(seen: Mapping[int, Seen], before: Mapping[int, Seen], *, ranks: Collection[int], seconds: float) -> bool:
    """Whether all ``ranks`` have waited for one another for ``seconds``, in different places, and still live.

    Args:
        seen: rank -> what it says now.
        before: the same, one look earlier.
        ranks: all ranks of the world.
        seconds: how long is long.
    """
    if set(seen) != set(ranks) or set(before) != set(ranks):
        return False
    if any(seen[rank].waited < seconds or seen[rank].beats == before[rank].beats for rank in ranks):
        return False
    return len({one.where for one in seen.values()}) > 1
