"""The parity suite with communication=shm: a few cases of each plugin. All of them: test_shm_parity_full."""

import pytest
from shm_ranks import BACKEND

from polyscale.testing import parity
from polyscale.testing.parity import Case, Task

OVER = (("communication", BACKEND),)
WITH_ALL = {"clipped": True, "reuse": True, "tied": True, "frozen": True, "empty": True, "idle": True}
CASES = [
    Case(Task(accumulation=3, optimizer="adamw", branch="one-rank", **WITH_ALL), "ddp", 0, OVER),
    Case(Task(optimizer="lion", dtype="bf16", clipped=True), "ddp", 0, OVER),
    Case(Task(accumulation=3, optimizer="muon", branch="one-rank", **WITH_ALL), "fsdp2", 1, OVER),
    Case(Task(accumulation=3, optimizer="adamw", branch="no-rank", **WITH_ALL), "fsdp2", 3, OVER),
    Case(Task(optimizer="adamw", dtype="bf16", tied=True, clipped=True), "fsdp2", 3, OVER),
]


def engine_in_a_group_of_it(case, model):
    """The engine on a default group of the backend under test."""
    import torch.distributed as dist
    from shm_ranks import regroup

    if dist.get_backend() != BACKEND:
        regroup(BACKEND, prefix="parity-group")
    return parity.polyscale_engine(case, model)


SUITE = parity.Suite(CASES, engine_in_a_group_of_it)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_parity(case):
    parity.check(case, SUITE.result(case))
