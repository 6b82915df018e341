"""Parameters in one piece of memory of a host: trained as without it, held once, and foreign writes are found."""

import contextlib
import ctypes
import gc
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from zero_ranks import regroup

import polyscale
from polyscale.errors import PolyscaleError
from polyscale.testing import parity, ranks
from polyscale.testing.parity import Case, Task

pytest.importorskip("polyscale_communication")
STAGES = (1, 2)


SHARED = (("communication", "shm"),)


def sharing(case, model):
    """The engine of a case, with common memory that is checked."""
    regroup("shm")
    config = case.config()
    config["backends"]["options"] = {"zero": {"share_host_memory": True, "check_shared_memory": True}}
    return polyscale.initialize(model, config=config)


class Model(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(width, 1)

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return self.head(x).square().mean()


def engine_of(stage, model=None, *, communication="shm", bf16=False, **more):
    regroup(communication)
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": bf16},
        "backends": {
            "accelerator": "cpu",
            "data_parallel": "zero",
            "communication": communication,
            "options": {"zero": more},
        },
    }
    return polyscale.initialize(Model() if model is None else model, config=config)


def train(engine, steps=1, width=8):
    for step in range(steps):
        generator = torch.Generator().manual_seed(10 * step + engine.topology.rank)
        engine.backward(engine(torch.randn(2, width, generator=generator)))
        engine.step()


def error_of(call):
    try:
        call()
    except PolyscaleError as error:
        assert error.given and error.why and error.fix, error
        return str(error)
    return "no error"


# Parity.

AWKWARD = Task(accumulation=3, optimizer="adamw", branch="one-rank", tied=True, reuse=True, frozen=True)
QUICK = [Case(AWKWARD, "zero", stage, SHARED) for stage in STAGES]
QUICK += [Case(Task(optimizer="muon", dtype="bf16", clipped=True, empty=True), "zero", 2, SHARED)]
FULL = [
    Case(case.task, case.plugin, case.stage, SHARED)
    for case in parity.parity_cases("zero", stages=STAGES, communication="shm")
]
SUITE, FULL_SUITE = parity.Suite(QUICK, sharing), parity.Suite(FULL, sharing)


@pytest.mark.parametrize("case", QUICK, ids=str)
def test_parity(case):
    parity.check(case, SUITE.result(case))


@pytest.mark.long
@pytest.mark.parametrize("case", FULL, ids=str)
def test_parity_of_every_pair(case):
    parity.check(case, FULL_SUITE.result(case))


def run_both_ways(folder, stage, bf16):
    """Weights of a run that is saved, loaded elsewhere, exported and written into: with common memory, and without."""
    from safetensors.torch import load_file

    found = {}
    for name, more in {"own": {}, "common": {"share_host_memory": True}}.items():
        with engine_of(stage, bf16=bf16, **more) as engine:
            train(engine, 3)
            engine.save(f"{folder}/{name}")
            engine.export(f"{folder}/{name}.safetensors")
        for other, again in {"own": {}, "common": {"share_host_memory": True}}.items():
            with engine_of(stage, bf16=bf16, **again) as engine:
                engine.load(f"{folder}/{name}")
                engine.parameters_store.set_full("head.bias", torch.full((1,), 0.5))
                with engine.parameters_store.gathered(["head.weight"], modify=True) as whole:
                    whole["head.weight"].mul_(1.0 + engine.topology.rank)
                train(engine, 2)
                found[name, other] = dict(engine.parameters_store.iter_full())
        found[name] = load_file(f"{folder}/{name}.safetensors")
    return found


@pytest.mark.parametrize(("stage", "bf16"), [(1, False), pytest.param(2, True, marks=pytest.mark.long)])
def test_it_trains_saves_loads_and_exports_as_without(stage, bf16, tmp_path):
    for found in ranks(2).run(run_both_ways, str(tmp_path), stage, bf16):
        for name, value in found["own"].items():
            assert torch.equal(value, found["common"][name])
        for key in [("own", "common"), ("common", "own"), ("common", "common")]:
            for name, value in found["own", "own"].items():
                assert torch.equal(value, found[key][name]), (key, name)


# One copy.


def the_memory_is_one():
    with engine_of(2, share_host_memory=True) as engine:
        train(engine)
        rank = engine.topology.rank
        weight = engine.module.head.weight
        dist.barrier()
        if rank == 0:
            weight.data[0, 0] = 123.0
        dist.barrier()
        seen = weight.detach()[0, 0].item()
        dist.barrier()
        return seen


def test_ranks_see_one_memory():
    assert ranks(2).run(the_memory_is_one) == [123.0, 123.0]


def proportional_bytes():
    """This process's part of the memory that it uses, shared pages divided by their users.

    Without files: pages of torch's libraries are divided among all processes of the host, whatever they are. And
    without what was freed: malloc keeps a part of it, another one from run to run.
    """
    ctypes.CDLL(None).malloc_trim(0)
    found = dict(line.split(":") for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
    return sum(int(found[kind].split()[0]) * 1024 for kind in ("Pss_Anon", "Pss_Shmem"))


@pytest.mark.long
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("stage", STAGES)
def test_the_host_holds_the_parameters_once(stage, world):
    found = {}
    for share in (False, True):
        pool = _fresh(world)
        try:
            (size, pss), *_ = pool.run(one_run, stage, 4096, share, timeout=120)
        finally:
            pool.close()
        found[share] = pss
    assert size >= 200e6  # beside which the few MiB of scratch that shm has for each rank are little
    saved = found[False] - found[True]
    assert saved >= 0.95 * (world - 1) * size, (saved / size, found, size)


def _fresh(world):
    from polyscale.testing.pool import RankPool

    return RankPool(world)


def one_run(stage, width, share):
    """(P, sum of PSS of the ranks)."""
    model = Model(width)
    size = sum(parameter.numel() * 4 for parameter in model.parameters())
    with engine_of(stage, model, share_host_memory=share) as engine:
        del model
        train(engine, 2, width)
        gc.collect()
        dist.barrier()
        pss = torch.tensor([proportional_bytes()])
        dist.barrier()
        dist.all_reduce(pss)
    return size, int(pss)


# Foreign writes.


def write(weight):
    weight[-1] += 1.0


def write_through_data(weight):
    weight.data[-1].add_(1.0)


def write_through_detach(weight):
    weight.detach()[-1].mul_(3.0)


def foreign_writes(stage, how, bf16):
    """A rank writes into the end of a weight, which the last rank owns; what each rank is told, and afterwards."""
    with engine_of(stage, share_host_memory=True, check_shared_memory=True, bf16=bf16) as engine:
        train(engine, 2)
        dist.barrier()
        if engine.topology.rank == 0:
            with torch.no_grad():
                how(engine.module.blocks[2][0].weight)
        dist.barrier()
        text = error_of(lambda: train(engine))
        return text


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("how", [write, write_through_data, write_through_detach])
def test_a_write_of_one_rank_is_found_at_the_next_update(how, bf16):
    for text in ranks(2).run(foreign_writes, 2, how, bf16):
        assert "blocks.2.0.weight" in text and "shared memory" in text, text
        assert "blocks.1" not in text
        assert "modify=True" in text
        if how is not write_through_data:
            assert "rank 0 wrote" in text
        else:
            assert ".data" in text


def sanctioned_writes(stage):
    with engine_of(stage, share_host_memory=True, check_shared_memory=True) as engine:
        store = engine.parameters_store
        train(engine)
        with store.gathered(["blocks.2.0.weight", "head.bias"], modify=True) as whole:
            whole["blocks.2.0.weight"].fill_(0.25)
            engine.module.head.bias.data.fill_(2.0)
        assert bool((engine.module.blocks[2][0].weight == 0.25).all())
        train(engine)
        store.set_full("head.weight", torch.ones(1, 8))
        train(engine)
        engine.eval()
        engine(torch.ones(1, 8))
        engine.train()
        train(engine)
        with torch.no_grad(), contextlib.suppress(PolyscaleError), store.gathered(["head.weight"]) as whole:
            whole["head.weight"].zero_()
        train(engine)
        return engine.steps


@pytest.mark.parametrize("stage", STAGES)
def test_writes_through_the_store_are_no_foreign_writes(stage):
    assert ranks(2).run(sanctioned_writes, stage) == [5, 5]


def a_load_heals(folder):
    with engine_of(2, share_host_memory=True, check_shared_memory=True) as engine:
        train(engine, 2)
        engine.save(folder)
        expected = dict(engine.parameters_store.iter_full())
        if engine.topology.rank == 0:
            engine.module.blocks[2][0].weight.data.zero_()
        dist.barrier()
        text = error_of(lambda: train(engine))
        engine.load(folder)
        found = dict(engine.parameters_store.iter_full())
        train(engine)
        return text, all(torch.equal(expected[name], found[name]) for name in expected)


def test_a_load_brings_the_right_values_back(tmp_path):
    for text, equal in ranks(2).run(a_load_heals, str(tmp_path)):
        assert "blocks.2.0.weight" in text and equal


# What cannot be.


def refused():
    found = {
        "gloo": error_of(lambda: engine_of(2, communication="gloo", share_host_memory=True)),
        "stage 3": error_of(lambda: engine_of(3, share_host_memory=True)),
        "nothing to check": error_of(lambda: engine_of(2, check_shared_memory=True)),
    }
    return found


def test_where_memory_cannot_be_common():
    for found in ranks(2).run(refused):
        assert "'gloo'" in found["gloo"] and '"shm"' in found["gloo"]
        assert "stage 3" in found["stage 3"] and "stage 1 or 2" in found["stage 3"]
        assert "check_shared_memory" in found["nothing to check"]


def refused_on_a_device():
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW"},
        "zero_optimization": {"stage": 2},
        "backends": {
            "accelerator": "sim",
            "data_parallel": "zero",
            "options": {"zero": {"share_host_memory": True}},
        },
    }
    return error_of(lambda: polyscale.initialize(Model(), config=config))


def test_on_a_device_memory_is_not_common():
    for text in ranks(2, accelerator="sim").run(refused_on_a_device):
        assert "on sim" in text and "accelerator cpu" in text
