"""The parity suite: every three settings over gloo, and every pair over gloo and over shm."""

import pytest
from zero_ranks import engine_over_its_communication

from polyscale.testing import parity

FULL = parity.parity_cases("zero", stages=(1, 2, 3), level="full", communication="gloo")
SUITES = {
    name: parity.Suite(
        dict.fromkeys(
            [
                *parity.parity_cases("zero", stages=(1, 2, 3), communication=name),
                *(FULL if name == "gloo" else ()),
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
