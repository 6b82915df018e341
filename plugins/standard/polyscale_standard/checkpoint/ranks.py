"""Steps of all ranks of a group in which the failure of one is the error of all.

Notable: a rank that fails still takes part in the collective, with its failure as its answer; so nobody waits for it,
and every rank raises the same words. Failures travel as text, not as pickled exceptions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from os import PathLike, fspath
from typing import Any, TypeVar, cast

import torch.distributed as dist

from polyscale.checkpoint.faults import advice, cause
from polyscale.errors import CheckpointError

T = TypeVar("T")
R = TypeVar("R")
_SHOWN = 4


@dataclass(frozen=True)
class _Failure:
    rank: int
    cause: str
    advice: str


class Ranks:
    """The ranks of ``group``; None: the default group, or this process alone where there is none.

    Args:
        group: the group.
        path: the directory that errors name.
    """

    def __init__(self, group: dist.ProcessGroup | None, path: str | PathLike[str]) -> None:
        self._path = path
        self._group = group
        alone = not (dist.is_available() and dist.is_initialized())
        self.rank = 0 if alone else dist.get_rank(group)
        self.world = 1 if alone else dist.get_world_size(group)
        if self.rank < 0:
            raise CheckpointError("This rank is not in the group of the checkpoint", fix="Call it in its ranks only")
        self._first = 0 if alone or group is None else dist.get_global_rank(group, 0)

    def central(
        self, doing: str, local: Callable[[], T], merge: Callable[[list[T]], Sequence[R]], *, warning: str = ""
    ) -> R:
        """Call ``local`` on every rank, ``merge`` on rank 0 with all values; each rank gets its part of the result.

        Args:
            doing: what errors say ("written", "read").
            local: the part of each rank.
            merge: the values of all ranks -> one result for each.
            warning: what a failure leaves behind, for its error.

        Raises:
            CheckpointError: on every rank, when one failed.
        """
        mine, error = self._attempt(local)
        everyone = self._gather(mine)
        answers: list[Any] | None = None
        if everyone is not None:
            failures = [value for value in everyone if isinstance(value, _Failure)]
            if not failures:
                merged, error = self._attempt(lambda: merge(everyone))
                failures = [merged] if isinstance(merged, _Failure) else []
            answers = [failures] * self.world if failures else [[value] for value in merged]
        answer = self._scatter(answers)
        if isinstance(answer[0], _Failure):
            raise self._error(doing, answer, warning) from error
        return cast(R, answer[0])

    def together(self, doing: str, local: Callable[[], Any], *, warning: str = "") -> None:
        """Call ``local`` on every rank; ``warning`` says in an error what a failure leaves behind.

        Raises:
            CheckpointError: on every rank, when one failed.
        """

        def part() -> None:
            local()

        self.central(doing, part, lambda values: values, warning=warning)

    def _attempt(self, call: Callable[[], Any]) -> tuple[Any, Exception | None]:
        try:
            return call(), None
        except Exception as error:
            return _Failure(self.rank, cause(error), advice(error)), error

    def _gather(self, value: Any) -> list[Any] | None:
        if self.world == 1:
            return [value]
        everyone: list[Any] | None = [None] * self.world if self.rank == 0 else None
        dist.gather_object(value, everyone, dst=self._first, group=self._group)
        return everyone

    def _scatter(self, values: list[Any] | None) -> Any:
        if self.world == 1:
            assert values is not None
            return values[0]
        received: list[Any] = [None]
        dist.scatter_object_list(received, values, src=self._first, group=self._group)
        return received[0]

    def _error(self, doing: str, failures: list[_Failure], warning: str) -> CheckpointError:
        shown = failures[:_SHOWN]
        why = "; ".join(f"rank {failure.rank}: {failure.cause.rstrip('.')}" for failure in shown)
        if len(failures) > len(shown):
            why += f"; {len(failures) - len(shown)} more ranks failed"
        return CheckpointError(
            f"{fspath(self._path)} cannot be {doing}", why=why, fix=". ".join(filter(None, (warning, shown[0].advice)))
        )
