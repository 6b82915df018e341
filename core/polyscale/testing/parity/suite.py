"""The test side of the parity suite: runs cases in batches on a pool of ranks and keeps their results.

Notable: a batch is one call of the pool, so 30 cases cost one process group. When a batch ends early (a case failed, a
rank died, nothing moved any more), the cases after the culprit run in a new batch, and after ``PATIENCE`` pools were
lost the rest is given up, so that a broken plugin costs minutes, not hours.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from polyscale.testing.failures import RanksFailed
from polyscale.testing.parity.cases import Case
from polyscale.testing.parity.runner import EngineFactory, RankRun, polyscale_engine, run_batch
from polyscale.testing.pool import ranks

PATIENCE = 3
SECONDS_PER_BATCH = 45.0
SECONDS_PER_CASE = 2.0


class Suite:
    """Cases, and their results once one is asked for: all cases of the same stage then run together.

    Args:
        cases: of one or more plugins.
        factory: makes the engine of a case on a rank: ``factory(case, model)``, at the top level of a file.
    """

    def __init__(self, cases: Iterable[Case], factory: EngineFactory = polyscale_engine) -> None:
        self.cases = list(cases)
        self.factory = factory
        self._results: dict[Case, list[RankRun]] = {}
        self._lost = 0

    def result(self, case: Case) -> list[RankRun]:
        """The runs of ``case``, by rank."""
        if case not in self._results:
            batch = [other for other in self.cases if _batch(other) == _batch(case)]
            self._run_all(batch if case in batch else [case])
        return self._results[case]

    def _run_all(self, cases: Sequence[Case]) -> None:
        left = list(cases)
        alone = False
        while left and self._lost < PATIENCE:
            batch = left[:1] if alone else left
            try:
                done = self._run_batch(batch)
            except RanksFailed as error:
                if len(batch) > 1:
                    alone = True
                    continue
                self._lost += 1
                alone = False
                done = [[RankRun(error=f"{failure.text()}\n") for failure in error.failures]]
            self._results.update(zip(left, done, strict=False))
            left = left[len(done) :]
        for case in left:
            self._results[case] = [RankRun(error=f"not run: ranks were lost in {PATIENCE} cases before this one")]

    def _run_batch(self, cases: Sequence[Case]) -> list[list[RankRun]]:
        """Return the runs of the first cases, up to the first that failed: by case, then by rank."""
        timeout = SECONDS_PER_BATCH + SECONDS_PER_CASE * len(cases)
        pool = ranks(cases[0].task.world, accelerator=cases[0].accelerator)
        by_rank = pool.run(run_batch, cases, self.factory, timeout=timeout)
        return [list(runs) for runs in zip(*by_rank, strict=True)]


def run_case(case: Case, factory: EngineFactory = polyscale_engine) -> list[RankRun]:
    """Run one case alone and return its runs, by rank."""
    return Suite([case], factory).result(case)


def _batch(case: Case) -> tuple[object, ...]:
    return case.plugin, case.stage, case.backends, case.extra, case.task.world
