"""The parity suite of ddp and fsdp2: every pair of settings in float64. The other dtypes are long."""

import pytest

from polyscale.testing import parity

CASES = parity.parity_cases("ddp", stages=(0,)) + parity.parity_cases("fsdp2", stages=(1, 2, 3))
SUITE = parity.Suite(case for case in CASES if case.task.dtype == "fp64")


@pytest.mark.parametrize("case", SUITE.cases, ids=str)
def test_parity(case):
    parity.check(case, SUITE.result(case))
