"""The parity suite on the simulated device, with everything late: a forgotten wait anywhere would be a wrong number."""

import pytest
import torch

from polyscale.testing import parity, ranks
from polyscale.testing.parity import Case, Task

ON_SIM = (("accelerator", "sim"),)
WITH_ALL = {"clipped": True, "reuse": True, "tied": True, "frozen": True, "empty": True, "idle": True}
CASES = [
    Case(Task(accumulation=3, optimizer="adamw", branch="one-rank", **WITH_ALL), "ddp", 0, ON_SIM),
    Case(Task(optimizer="muon", dtype="fp32", branch="no-rank", clipped=True), "ddp", 0, ON_SIM),
    Case(Task(accumulation=3, optimizer="lion", dtype="bf16"), "ddp", 0, ON_SIM),
]
for stage in (1, 2, 3):
    CASES += [
        Case(Task(accumulation=3, optimizer="adamw", branch="one-rank", **WITH_ALL), "fsdp2", stage, ON_SIM),
        Case(Task(optimizer="muon", branch="no-rank", reuse=True), "fsdp2", stage, ON_SIM),
        Case(Task(accumulation=3, optimizer="sgd", dtype="fp32", clipped=True), "fsdp2", stage, ON_SIM),
        Case(Task(optimizer="adamw", dtype="bf16", tied=True), "fsdp2", stage, ON_SIM),
    ]


def on_time_again():
    from polyscale_sim import faults

    faults.reset()


@pytest.fixture(autouse=True, scope="module")
def faults_end_here():
    yield
    ranks(2, accelerator="sim").run(on_time_again)


def engine_with_late_work(case, model):
    from polyscale_sim import faults

    faults.late(True)
    return parity.polyscale_engine(case, model)


def engine_on_time(case, model):
    from polyscale_sim import faults

    faults.late(False)
    return parity.polyscale_engine(case, model)


# Work that is late waits at the same places as work on time, so at every change a hard case of each stage is run late.
HARD = [case for case in CASES if case.task.idle]
OTHERS = [case for case in CASES if not case.task.idle]
LATE, LATE_OTHERS = parity.Suite(HARD, engine_with_late_work), parity.Suite(OTHERS, engine_with_late_work)
ON_TIME = parity.Suite(CASES, engine_on_time)


@pytest.mark.parametrize("case", HARD, ids=str)
def test_parity_with_late_work(case):
    parity.check(case, LATE.result(case))


@pytest.mark.long
@pytest.mark.parametrize("case", OTHERS, ids=str)
def test_parity_of_other_cases_with_late_work(case):
    parity.check(case, LATE_OTHERS.result(case))


@pytest.mark.long
@pytest.mark.parametrize("case", CASES, ids=str)
def test_parity(case):
    parity.check(case, ON_TIME.result(case))


def engine_that_forgets(case, model):
    """ddp that reads what it reduced in bf16, or fsdp2 that reads gathered parameters, without waiting for them."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group

    from polyscale_standard.communication.work import C10dWork

    engine = engine_with_late_work(case, model)
    owner, name = (C10dWork, "wait") if case.plugin == "ddp" else (_fsdp_param_group.FSDPParamGroup, "wait_for_unshard")
    original, close = getattr(owner, name), engine.close

    def forgetful_wait(work):
        if not any(tensor.dtype == torch.bfloat16 for tensor in work._tensors):
            original(work)

    def forgetful_unshard(unit):
        if unit._all_gather_result is not None:
            unit._all_gather_result = unit._all_gather_result._replace(all_gather_event=None)
        original(unit)

    def close_and_restore():
        setattr(owner, name, original)
        close()

    setattr(owner, name, forgetful_wait if case.plugin == "ddp" else forgetful_unshard)
    engine.close = close_and_restore
    return engine


@pytest.mark.parametrize(("plugin", "stage"), [("ddp", 0), ("fsdp2", 3)])
def test_a_forgotten_wait_is_caught(plugin, stage):
    extra = (("communication_data_type", "bf16"),) if plugin == "ddp" else ()
    case = Case(Task(optimizer="sgd", dtype="bf16"), plugin, stage, ON_SIM, extra)
    parity.check(case, parity.run_case(case, engine_with_late_work))
    with pytest.raises(parity.ParityError, match="nan"):
        parity.check(case, parity.run_case(case, engine_that_forgets))
