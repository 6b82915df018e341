"""The parity suite of ddp and fsdp2: every three settings together, and the pairs that the quick tests leave out."""

import pytest

from polyscale.testing import parity

QUICK = parity.parity_cases("ddp", stages=(0,)) + parity.parity_cases("fsdp2", stages=(1, 2, 3))
FULL = parity.parity_cases("ddp", stages=(0,), level="full")
FULL += parity.parity_cases("fsdp2", stages=(1, 2, 3), level="full")
SUITE = parity.Suite(dict.fromkeys([case for case in QUICK if case.task.dtype != "fp64"] + FULL))


@pytest.mark.long
@pytest.mark.parametrize("case", SUITE.cases, ids=str)
def test_parity(case):
    parity.check(case, SUITE.result(case))
