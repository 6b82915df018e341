"""The parity suite at stages 1 to 3 on 2 ranks: every pair of settings in float64 over shm, and a few over gloo.

What else there is, over both, is in test_zero_parity_full.
"""

import pytest
from zero_ranks import engine_over_its_communication

from polyscale.testing import parity

SHM = [case for case in parity.parity_cases("zero", stages=(1, 2, 3), communication="shm") if case.task.dtype == "fp64"]
GLOO = parity.parity_cases("zero", stages=(1, 2, 3), communication="gloo")[::6]
SUITES = {
    "shm": parity.Suite(SHM, engine_over_its_communication),
    "gloo": parity.Suite(GLOO, engine_over_its_communication),
}


@pytest.mark.parametrize("case", GLOO + SHM, ids=str)
def test_parity(case):
    parity.check(case, SUITES[dict(case.backends)["communication"]].result(case))
