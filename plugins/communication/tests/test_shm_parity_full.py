"""Every pair of settings of the parity suite with communication=shm."""

import pytest
from shm_ranks import BACKEND

from polyscale.testing import parity

CASES = parity.parity_cases("ddp", stages=(0,), communication=BACKEND)
CASES += parity.parity_cases("fsdp2", stages=(1, 2, 3), communication=BACKEND)


def engine_in_a_group_of_it(case, model):
    """The engine on a default group of the backend under test."""
    import torch.distributed as dist
    from shm_ranks import regroup

    if dist.get_backend() != BACKEND:
        regroup(BACKEND, prefix="parity-group")
    return parity.polyscale_engine(case, model)


SUITE = parity.Suite(CASES, engine_in_a_group_of_it)


@pytest.mark.long
@pytest.mark.parametrize("case", SUITE.cases, ids=str)
def test_parity(case):
    parity.check(case, SUITE.result(case))
