"""The log of what happened to ranks: one list of small records in the store, read by every watchdog.

Notable: one counter tells whether there is something new, so that looking costs one request whatever the world's
size. A rank writes ``here`` when it begins to watch, ``left`` when it ends without an exception, ``failed`` when it
raised; who finds another one gone writes that on its behalf, once.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from polyscale.control.places import Place, line_of_exception
from polyscale.control.processes import Identity
from polyscale.errors import RankError

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

_COMMUNICATION_WORDS = (
    "closed by peer",
    "connection reset",
    "broken pipe",
    "timed out",
    "timeout",
    "peer closed",
    "nccl",
)
_TIMEOUT_WORDS = ("timed out", "timeout", "failed to pass monitoredbarrier")
_BACKEND_WORDS = ("gloo", "ccl", "processgroup", "monitoredbarrier")  # nccl, rccl, xccl, hccl, oneccl
_SHOWN = 500


@dataclass(frozen=True)
class Event:
    """One record.

    Attributes:
        kind: here, left, failed (an exception passed the engine), fell (an uncaught exception ends the process),
            gone (its process has ended without a word), silent (no sign of life from another host), stuck (the ranks
            wait for one another; said by rank 0 for all).
        rank: which rank it is about.
        host, place, pid, started: its process (see ``Identity``).
        number: failed: how many times that rank has failed.
        doing: what it was doing, in words.
        line: innermost line of the user's code.
        error: exception type and message; stuck: what to say.
        secondary: the exception is what the loss of another rank looks like.
        timeout: it says that a collective did not complete in time.
        step: updates done; -1 where that is not known.
        last: left: the whole process ends, and with rank 0's perhaps the store.
        code: left: the exit code, where the watchdog ends the process.
    """

    kind: Literal["here", "left", "failed", "fell", "gone", "silent", "stuck"]
    rank: int
    host: str = ""
    place: str = ""
    pid: int = 0
    started: str = ""
    number: int = 0
    doing: str = ""
    line: str = ""
    error: str = ""
    secondary: bool = False
    timeout: bool = False
    step: int = 0
    last: bool = False
    code: int = 0

    @property
    def identity(self) -> Identity:
        """The process of the rank."""
        return Identity(self.host, self.place, self.pid, self.started)

    def __str__(self) -> str:
        who = f"rank {self.rank} ({self.identity})"
        if self.kind in ("failed", "fell"):
            at = f" at {self.line}" if self.line else ""
            return f"{who} raised {self.error}{at}, while {self.doing}"
        if self.kind == "left":
            if self.code:
                return f"{who} has ended itself (exit code {self.code}) because another rank had ended or failed"
            after = f" after step {self.step}" if self.step >= 0 else ""
            how = "its script ended or called sys.exit" if self.last else "it closed its engine, or its process ended"
            return f"{who} has left{after} without an error ({how})"
        if self.kind == "silent":
            return f"{who} gives no sign of life; its host, or the way to it, is gone"
        return f"{who} is gone: its process was killed or ended at once"


def of_exception(
    exception: BaseException,
    *,
    kind: Literal["failed", "fell"],
    rank: int,
    identity: Identity,
    number: int,
    place: Place,
) -> Event:
    """Describe an exception of this rank."""
    message = str(exception).strip()
    # An error that explains another one is as much a consequence as that one.
    seen = exception.__cause__ if isinstance(exception, RankError) and exception.__cause__ is not None else exception
    text = f"{type(exception).__name__}: {message}" if message else type(exception).__name__
    return Event(
        kind,
        rank,
        **asdict(identity),
        number=number,
        doing=place.of(exception),
        line=line_of_exception(exception),
        error=text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "...",
        secondary=is_communication_error(seen),
        timeout=is_timeout(seen),
        step=place.step,
    )


def is_communication_error(exception: BaseException) -> bool:
    """Whether an exception is what the loss of another rank looks like here."""
    if type(exception).__name__ in ("DistBackendError", "DistNetworkError", "DistStoreError"):
        return True
    text = str(exception).lower()
    return isinstance(exception, RuntimeError) and any(word in text for word in _COMMUNICATION_WORDS)


def is_timeout(exception: BaseException) -> bool:
    """Whether an exception says that a collective, or torch's store, did not complete in time."""
    text = str(exception).lower()
    if not isinstance(exception, RuntimeError) or not any(word in text for word in _TIMEOUT_WORDS):
        return False
    return type(exception).__name__.startswith("Dist") or any(word in text for word in _BACKEND_WORDS)


@dataclass
class Log:
    """The records in ``store``, over one connection; not for two threads."""

    store: Store
    read: int = 0
    _absent: list[int] = field(default_factory=list)

    def write(self, event: Event) -> int:
        """Append a record; returns its number, from 1."""
        number = int(self.store.add("log/length", 1))
        self.store.set(f"log/{number}", json.dumps(asdict(event)))
        return number

    def new(self) -> list[Event]:
        """The records that were not read yet; after an error, which may be a time-out, all of them the next time.

        One that is announced but not there yet, because its writer is slow or has died in between, is looked for again
        and hides none: behind it another rank may have said that it leaves, and that rank must not be taken for killed.
        """
        length = int(self.store.add("log/length", 0))
        events: list[Event] = []
        absent: list[int] = []
        for number in (*self._absent, *range(self.read + 1, length + 1)):
            key = f"log/{number}"
            if self.store.check([key]):
                fields: dict[str, Any] = json.loads(self.store.get(key))
                events.append(Event(**fields))
            else:
                absent.append(number)
        self.read, self._absent = length, absent
        return events
