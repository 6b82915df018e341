"""What a case that failed on ranks looks like to the test that ran it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal


class RemoteError(Exception):
    """Stands in for an exception of a rank whose own class cannot be sent."""


@dataclass(frozen=True)
class PackedError:
    """An exception taken apart, because many classes (keyword-only arguments) cannot be rebuilt by pickle."""

    type: type[BaseException]
    args: tuple[Any, ...]
    attributes: dict[str, Any]

    def unpack(self) -> BaseException:
        """Put the exception together again, without calling its constructor."""
        error = self.type.__new__(self.type, *self.args)
        error.args = self.args
        error.__dict__.update(self.attributes)
        return error


@dataclass(frozen=True)
class RankFailure:
    """What one rank did in a case that failed.

    Attributes:
        rank: its rank.
        kind: "ok" (it finished), "exception", "exit" (the process ended) or "timeout" (it did not finish).
        exception: what it raised; None for the other kinds.
        traceback: text of the traceback; "" for the other kinds.
        exit_code: of the process, -N for signal N; None while it was alive.
        output: what it wrote to stdout and stderr; for "timeout" with the place of each of its threads.
    """

    rank: int
    kind: Literal["ok", "exception", "exit", "timeout"]
    exception: BaseException | None = None
    traceback: str = ""
    exit_code: int | None = None
    output: str = ""

    def text(self) -> str:
        """Describe it in a paragraph."""
        what = {
            "ok": "finished",
            "exception": "raised",
            "exit": f"ended with exit code {self.exit_code}",
            "timeout": "did not finish and was killed",
        }[self.kind]
        parts = [f"--- rank {self.rank} {what}", self.traceback.rstrip()]
        if self.output.strip():
            parts += [f"--- rank {self.rank} wrote", self.output.rstrip()]
        return "\n".join(part for part in parts if part)


class RanksFailed(Exception):
    """At least one rank did not finish a case.

    Attributes:
        failures: one :class:`RankFailure` per rank, by rank.
    """

    def __init__(self, case: str, failures: tuple[RankFailure, ...]) -> None:
        self.case = case
        self.failures = failures
        super().__init__(case, failures)

    @property
    def exceptions(self) -> tuple[BaseException | None, ...]:
        """What each rank raised, by rank."""
        return tuple(failure.exception for failure in self.failures)

    @property
    def exit_codes(self) -> tuple[int | None, ...]:
        """Exit code of each rank that ended, by rank."""
        return tuple(failure.exit_code for failure in self.failures)

    def __str__(self) -> str:
        told = [failure.text() for failure in self.failures]
        return f"{self.case} failed on {len(self.failures)} ranks\n" + "\n".join(told)
