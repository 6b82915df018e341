"""The parity suite: every three settings over gloo and over shm, and every pair that the quick tests leave out."""

import pytest
from zero_ranks import engine_over_its_communication

from polyscale.testing import parity

SUITES = {
    name: parity.Suite(
        dict.fromkeys(
            [
                *parity.parity_cases("zero", stages=(1, 2, 3), communication=name),
                *parity.parity_cases("zero", stages=(1, 2, 3), level="full", communication=name),
            ]
        ),
        engine_over_its_communication,
    )
    for name in ("gloo", "shm")
}


@pytest.mark.long
@pytest.mark.parametrize("case", [case for suite in SUITES.values() for case in suite.cases], ids=str)
def test_parity(case):
    parity.check(case, SUITES[dict(case.backends)["communication"]].result(case))
