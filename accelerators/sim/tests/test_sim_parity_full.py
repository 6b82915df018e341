"""Every pair of settings of the parity suite on the simulated device, with late copies and collectives."""

import pytest

from polyscale.testing import parity, ranks

CASES = parity.parity_cases("ddp", stages=(0,), accelerator="sim")
CASES += parity.parity_cases("fsdp2", stages=(1, 2, 3), accelerator="sim")


def engine_with_late_work(case, model):
    from polyscale_sim import faults

    faults.late(True)
    return parity.polyscale_engine(case, model)


def on_time_again():
    from polyscale_sim import faults

    faults.reset()


@pytest.fixture(autouse=True, scope="module")
def faults_end_here():
    yield
    ranks(2, accelerator="sim").run(on_time_again)


SUITE = parity.Suite(CASES, engine_with_late_work)


@pytest.mark.long
@pytest.mark.parametrize("case", SUITE.cases, ids=str)
def test_parity_with_late_work(case):
    parity.check(case, SUITE.result(case))
