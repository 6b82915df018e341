"""The parity suite: small awkward models on 2 ranks against one process of plain torch on the joined batch.

::

    SUITE = parity.Suite(parity.parity_cases("fsdp2", stages=(1, 2, 3)))

    @pytest.mark.parametrize("case", SUITE.cases, ids=str)
    def test_parity(case):
        parity.check(case, SUITE.result(case))

Read ``cases`` (what is tried), ``oracle`` (what is right) and ``checks`` (how near is near enough). ``level="full"``
takes about three times as long, for a ``long`` test. ``factory=`` of :class:`Suite` makes the engine, for a plugin
that needs more than a configuration, and for trying the suite on something that is known to be right or wrong.
"""

from __future__ import annotations

from polyscale.testing.parity.cases import Case, Task, parity_cases
from polyscale.testing.parity.checks import ParityError, check, weight_differences
from polyscale.testing.parity.covering import covering_array
from polyscale.testing.parity.oracle import Run, exact_run, oracle_run
from polyscale.testing.parity.runner import RankRun, polyscale_engine
from polyscale.testing.parity.suite import Suite, run_case

__all__ = [
    "Case",
    "ParityError",
    "RankRun",
    "Run",
    "Suite",
    "Task",
    "check",
    "covering_array",
    "exact_run",
    "oracle_run",
    "parity_cases",
    "polyscale_engine",
    "run_case",
    "weight_differences",
]
