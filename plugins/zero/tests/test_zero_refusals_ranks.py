"""Ranks that differ, fail or die: all say who and where, in time, and nothing is left behind."""

import contextlib
import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import polyscale
from polyscale.testing import ranks, ranks_once

STAGES = (1, 2, 3)


class Block(nn.Module):
    def __init__(self, inner=4):
        super().__init__()
        self.up, self.down = nn.Linear(4, inner), nn.Linear(inner, 4)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Paths(nn.Module):
    """Runs its blocks in the order that it is told, and keeps gradients from those before ``cut``."""

    def __init__(self, inner=(4, 4, 4, 4)):
        super().__init__()
        self.blocks = nn.ModuleList(map(Block, inner))
        self.head = nn.Linear(4, 1)

    def forward(self, x, path=(0, 1, 2, 3), cut=None):
        for place, number in enumerate(path):
            x = self.blocks[number](x)
            if place == cut:
                x = x.detach()
        return self.head(x).square().mean()


def config(stage, accelerator="cpu", communication="gloo"):
    return {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage},
        "backends": {"accelerator": accelerator, "data_parallel": "zero", "communication": communication},
    }


def error_of(call):
    started = time.monotonic()
    try:
        call()
    except polyscale.PolyscaleError as error:
        assert error.given and error.fix
        return type(error).__name__, str(error), time.monotonic() - started
    except BaseException as error:
        return type(error).__name__, str(error), time.monotonic() - started
    return "no error", "", 0.0


MANY = (8, 4, 16, 12)
SAME = (4, 4, 4, 4)
# name -> sizes, and what each rank calls; the two units that are named
PATHS = {
    "a middle block skipped": (SAME, {}, {"path": (0, 2, 3)}, {"blocks.1", "blocks.2"}),
    "the last block skipped": (SAME, {}, {"path": (0, 1, 2)}, {"blocks.3", "blocks.2"}),
    "two blocks of equal size swapped": (SAME, {}, {"path": (0, 2, 1, 3)}, {"blocks.1", "blocks.2"}),
    "two blocks of different size swapped": (MANY, {}, {"path": (0, 2, 1, 3)}, {"blocks.1", "blocks.2"}),
    "a block run twice": (SAME, {}, {"path": (0, 1, 1, 2, 3)}, {"blocks.1", "blocks.2"}),
    "another backward": (SAME, {}, {"cut": 1}, {"blocks.1"}),
}


def different_paths(name, accelerator, communication):
    sizes, *calls, _ = PATHS[name]
    from zero_ranks import regroup  # fresh processes, which other tests start, do not find it

    regroup(communication)
    torch.manual_seed(0)
    engine = polyscale.initialize(Paths(sizes), config=config(3, accelerator, communication))
    for _ in range(2):
        engine.backward(engine(torch.ones(2, 4)))
        engine.step()
    call = calls[engine.topology.rank]

    def differ():
        engine.backward(engine(torch.ones(2, 4), **call))
        engine.step()

    found = error_of(differ)
    with contextlib.suppress(polyscale.PolyscaleError):
        engine.close()
    return found


def check_paths(name, accelerator="cpu", communication="gloo"):
    *_, units = PATHS[name]
    for kind, text, seconds in ranks(2, accelerator=accelerator).run(different_paths, name, accelerator, communication):
        assert kind == "RankError", (kind, text)
        assert "Ranks run different units" in text and "all_gather" in text
        assert "rank 0" in text and "rank 1" in text
        for unit in units:
            assert repr(unit) in text, text
        assert seconds < 10


@pytest.mark.parametrize("name", PATHS)
def test_ranks_on_different_paths(name, communication):
    check_paths(name, communication=communication)


@pytest.mark.parametrize("name", ["a middle block skipped", "another backward"])
def test_ranks_on_different_paths_on_a_device(name):
    check_paths(name, "sim", "auto")


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in PATHS if name not in ("a middle block skipped", "another backward")])
def test_ranks_on_more_different_paths_on_a_device(name):
    check_paths(name, "sim", "auto")


def different_models(stage):
    sizes = (4, 4, 4, 4) if dist.get_rank() == 0 else (4, 4, 5, 4)
    return error_of(lambda: polyscale.initialize(Paths(sizes), config=config(stage)))


@pytest.mark.parametrize("stage", [1, 3])
def test_ranks_whose_models_differ(stage):
    for kind, text, _ in ranks(2).run(different_models, stage):
        assert kind == "PolyscaleError" or kind.endswith("Error"), kind
        assert "blocks.2.up.weight" in text, text
        assert "4, 4" in text and "5, 4" in text, text


class Failing(nn.Module):
    """Rank 1 comes to grief in the third forward, or in the backward of it."""

    def __init__(self, how):
        super().__init__()
        self.net, self.how, self.calls = Paths(), how, 0

    def forward(self, x):
        self.calls += 1
        loss = self.net(x)
        if self.calls == 3 and (self.how == "kill all" or dist.get_rank() == 1):
            if self.how in ("kill", "kill all"):
                os.kill(os.getpid(), signal.SIGKILL)
            if self.how == "interrupt":
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.5)
            if self.how == "raise in forward":
                raise KeyError("the user's own mistake")
            if self.how == "raise in backward":
                loss.register_hook(fail)
        return loss


def fail(_gradient):
    raise KeyError("the user's own mistake")


def train_until_grief(how, stage, communication):
    engine = polyscale.initialize(Failing(how), config=config(stage, communication=communication))
    for _ in range(6):
        engine.backward(engine(torch.ones(2, 4)))
        engine.step()


def left_behind():
    return {path.name for folder in ("/dev/shm", "/tmp") for path in Path(folder).glob("*polyscale*")}


QUICK = [("kill", 3, "gloo"), ("kill", 3, "shm"), ("raise in backward", 2, "shm")]
MORE = [
    (how, stage, communication)
    for communication in ("gloo", "shm")
    for stage in STAGES
    for how in ("kill", "raise in forward", "raise in backward", "interrupt", "kill all")
    if (how, stage, communication) not in QUICK
]


def check_grief(how, stage, communication):
    before = left_behind()
    outcomes = ranks_once(2, train_until_grief, how, stage, communication, timeout=150, env={"POLYSCALE_TIMEOUT": "30"})
    healthy, failed = outcomes
    assert not healthy.timed_out and not failed.timed_out
    assert left_behind() <= before
    if how == "kill all":
        assert {healthy.returncode, failed.returncode} == {-signal.SIGKILL}
        return
    assert failed.returncode == {"kill": -signal.SIGKILL, "interrupt": -signal.SIGINT}.get(how, 1) or (
        how == "interrupt" and failed.returncode in (1, 130)
    )
    assert healthy.returncode in (1, 75), healthy
    assert healthy.seconds - failed.seconds < 20
    assert "rank 1" in healthy.stderr.lower()
    if how.startswith("raise"):
        assert "the user's own mistake" in healthy.stderr


@pytest.mark.parametrize(("how", "stage", "communication"), QUICK)
def test_a_rank_that_fails_ends_the_others(how, stage, communication):
    check_grief(how, stage, communication)


@pytest.mark.long
@pytest.mark.parametrize(("how", "stage", "communication"), MORE)
def test_ranks_that_fail_in_other_ways(how, stage, communication):
    check_grief(how, stage, communication)


def an_exception_on_one_rank(stage, where):
    """Rank 1 alone raises: it, and the others, end with an error or go on, but nobody waits for ever."""
    engine = polyscale.initialize(Failing(f"raise in {where}"), config=config(stage))
    texts = []
    for _ in range(4):

        def step():
            engine.backward(engine(torch.ones(2, 4)))
            engine.step()

        texts.append(error_of(step))
    return texts


@pytest.mark.long
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("stage", STAGES)
def test_going_on_after_an_exception_on_one_rank_ends_in_a_clear_error(stage, where):
    outcomes = ranks_once(2, print_exceptions, stage, where, timeout=150, env={"POLYSCALE_TIMEOUT": "8"})
    assert not any(outcome.timed_out for outcome in outcomes)
    said = "".join(outcome.stdout + outcome.stderr for outcome in outcomes)
    assert "the user's own mistake" in said
    assert "rank 1" in said.lower()
    assert all(outcome.returncode >= 0 for outcome in outcomes)


def print_exceptions(stage, where):
    for kind, text, _ in an_exception_on_one_rank(stage, where):
        print(kind, text, flush=True)
