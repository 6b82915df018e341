import pytest

from polyscale.testing import parity

CASES = parity.parity_cases("ddp", stages=(0,)) + parity.parity_cases("fsdp2", stages=(1, 2, 3))
SUITE = parity.Suite(CASES)


@pytest.mark.parametrize("case", SUITE.cases, ids=str)
def test_parity(case):
    parity.check(case, SUITE.result(case))
