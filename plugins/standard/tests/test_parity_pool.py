"""Engines and the rank harness: what a case leaves behind must not reach the next."""

import os

import pytest
import torch

import polyscale
from polyscale.testing import RanksFailed, parity, ranks
from polyscale.testing.parity import Case, Task
from polyscale.testing.parity.model import batch_of, make_model


def leaves_an_engine_open(backwards):
    case = Case(Task(accumulation=3), "fsdp2", 2)
    engine = polyscale.initialize(make_model(case.task), config=case.config(), seed=0)
    for micro in range(backwards):
        engine.backward(engine(*batch_of(0, micro, engine.topology.rank)))
        engine.step()
    keep.append(engine)
    return os.getpid(), engine.topology.world_size


keep: list[object] = []


def fails_with_an_open_accumulation():
    leaves_an_engine_open(1)
    raise RuntimeError("after one of three micro-steps")


def test_an_engine_left_open_is_closed_and_the_ranks_go_on():
    pool = ranks(2)
    first = pool.run(leaves_an_engine_open, 3)
    assert [world for _, world in first] == [2, 2]
    assert pool.run(leaves_an_engine_open, 3) == first


def test_an_open_accumulation_left_behind_does_not_reach_the_next_case():
    pool = ranks(2)
    pool.run(leaves_an_engine_open, 1)
    assert [world for _, world in pool.run(leaves_an_engine_open, 3)] == [2, 2]
    with pytest.raises(RanksFailed, match="after one of three"):
        pool.run(fails_with_an_open_accumulation)
    case = Case(Task(tied=True), "ddp", 0)
    parity.check(case, parity.run_case(case))


def tampers(case, model):
    engine = parity.polyscale_engine(case, model)
    step = engine.optimizer.step

    def forgetful_step(*args, **kwargs):
        with torch.no_grad():
            for group in engine.optimizer.param_groups:
                for parameter in group["params"][:1]:
                    parameter.grad = None
        return step(*args, **kwargs)

    engine.optimizer.step = forgetful_step
    return engine


@pytest.mark.parametrize(("plugin", "stage"), [("ddp", 0), ("fsdp2", 1), ("fsdp2", 2), ("fsdp2", 3)])
def test_one_parameter_left_out_of_the_update_is_found(plugin, stage):
    case = Case(Task(optimizer="adamw", dtype="bf16"), plugin, stage)
    with pytest.raises(parity.ParityError, match=r"embedding\.weight is off"):
        parity.check(case, parity.run_case(case, tampers))
