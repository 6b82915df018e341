"""The parity suite on the simulated device with its own backend, where the results of collectives are late: what a
stream that did not wait reads of them is NaN.
"""

import pytest
import torch

from polyscale.testing import parity, ranks
from polyscale.testing.parity import Case, Task

ON_SIM = (("accelerator", "sim"),)
WITH_ALL = {"clipped": True, "reuse": True, "tied": True, "frozen": True, "empty": True, "idle": True}
QUICK = []
for stage in (1, 2, 3):
    QUICK += [
        Case(Task(accumulation=3, optimizer="adamw", branch="one-rank", **WITH_ALL), "zero", stage, ON_SIM),
        Case(Task(optimizer="muon", branch="no-rank", reuse=True), "zero", stage, ON_SIM),
        Case(Task(optimizer="adamw", dtype="bf16", tied=True), "zero", stage, ON_SIM),
    ]
ALL = parity.parity_cases("zero", stages=(1, 2, 3), accelerator="sim")


class Frozen(dict):
    """A dict that can be a part of a case."""

    def __hash__(self):
        return hash(tuple(sorted(self.items())))


LIMITS = Frozen(
    stage=3,
    stage3_param_persistence_threshold=20,
    stage3_max_reuse_distance=10**6,
    stage3_prefetch_bucket_size=10**6,
)


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


LATE = parity.Suite(QUICK, engine_with_late_work)
ALL_LATE = parity.Suite(ALL, engine_with_late_work)
ALL_ON_TIME = parity.Suite(ALL, engine_on_time)


@pytest.mark.parametrize("case", [case for case in QUICK if case.stage == 3], ids=str)
def test_parity_with_late_work(case):
    parity.check(case, LATE.result(case))


@pytest.mark.long
@pytest.mark.parametrize("case", ALL, ids=str)
def test_every_pair_with_late_work(case):
    parity.check(case, ALL_LATE.result(case))


@pytest.mark.long
@pytest.mark.parametrize("case", ALL, ids=str)
def test_every_pair_on_time(case):
    parity.check(case, ALL_ON_TIME.result(case))


def engine_that_forgets(case, model):
    """Does not wait for gathered parameters."""
    from polyscale_zero.flat import Flat

    engine = engine_with_late_work(case, model)
    original, close = Flat.finish_gather, engine.close

    def forgetful(flat):
        if flat._work is not None:
            flat._work.wait = lambda: None
        original(flat)

    def close_and_restore():
        Flat.finish_gather = original
        close()

    Flat.finish_gather = forgetful
    engine.close = close_and_restore
    return engine


def test_a_forgotten_wait_is_caught():
    case = Case(Task(optimizer="sgd"), "zero", 3, ON_SIM)
    with pytest.raises(parity.ParityError, match="nan"):
        parity.check(case, parity.run_case(case, engine_that_forgets))


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_units_that_stay_whole_and_are_gathered_far_ahead(dtype):
    task = Task(optimizer="adamw", dtype=dtype, reuse=True)
    case = Case(task, "zero", 3, ON_SIM, (("zero_optimization", LIMITS),))
    parity.check(case, parity.run_case(case, engine_with_late_work))


def gradients_in_bf16(late):
    """Sums of small integers, which bf16 has exactly."""
    import polyscale
    from polyscale_sim import faults

    faults.late(late)
    found = {}
    for stage in (1, 2, 3):
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 2,
            "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
            "zero_optimization": {"stage": stage},
            "communication_data_type": "bf16",
            "backends": {"accelerator": "sim", "data_parallel": "zero"},
        }
        model = torch.nn.Linear(3, 2)
        torch.nn.init.zeros_(model.weight)
        with polyscale.initialize(model, config=config) as engine:
            for value in (2.0, 4.0):
                engine.backward(engine(torch.full((1, 3), value)).sum())
                engine.step()
            found[stage] = engine.parameters_store.get_full("weight").tolist()
    faults.late(False)
    return found


@pytest.mark.parametrize("late", [False, True])
def test_gradients_that_travel_in_bf16(late):
    for found in ranks(2, accelerator="sim").run(gradients_in_bf16, late):
        for stage in (1, 2, 3):
            assert found[stage] == [[-3.0] * 3] * 2, stage
