"""Out of memory as an error of ours: how it is recognised, what it says, and what an engine is afterwards.

Here memory runs out on the host, by asking for more than there can be; each allocation of a step in turn fails in the
tests of the simulated device.
"""

import gc
import pickle
import traceback
import weakref

import pytest
import torch
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor

import polyscale
from polyscale.engine import holders, out_of_memory
from polyscale.engine.intact import Intact
from polyscale.errors import OutOfMemoryError, PolyscaleError, RankError

HUGE = 2**60


def _config(stage=0, **more):
    return {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage},
        "backends": {"data_parallel": "ddp" if stage == 0 else "fsdp2"},
        **more,
    }


class _Model(nn.Module):
    """Asks for too much where it is told to."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))

    def forward(self, x, greedy=""):
        for index, block in enumerate(self.blocks):
            x = block(x)
            if greedy == "forward" and index == 0:
                torch.empty(HUGE)
        if greedy == "backward":
            x.register_hook(lambda gradient: torch.empty(HUGE))
        return x.square().sum()


def _raise(call):
    try:
        call()
    except Exception as error:
        return error
    raise AssertionError("it did not raise")


def test_torchs_and_pythons_errors_are_recognised_through_wrappers():
    real = _raise(lambda: torch.empty(HUGE))
    assert type(real) is RuntimeError
    assert out_of_memory.found_in(real) is real
    assert out_of_memory.found_in(MemoryError())
    assert out_of_memory.found_in(torch.OutOfMemoryError("no more"))
    wrapped = RankError("all_reduce on rank 0")
    wrapped.__cause__ = real
    assert out_of_memory.found_in(wrapped) is real
    assert out_of_memory.found_in(RuntimeError("mat1 and mat2 shapes cannot be multiplied")) is None
    assert out_of_memory.found_in(ValueError("out of memory")) is None, "a user's own words"
    own = KeyError("no batch")
    own.__cause__ = real
    assert out_of_memory.found_in(own) is None, "a user's own class, which the user may be about to catch"


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("Tried to allocate 20.00 MiB. The device has a total capacity of 79.3 GiB", 20 * 2**20),
        ("out of memory: limit 4096 in use 4000 requested 512", 512),
        ("you tried to allocate 4611686018427387904 bytes. Error code 12", 2**62),
        ("no more", None),
    ],
)
def test_what_was_asked_for_is_read_from_the_backends_message(text, size):
    assert out_of_memory.requested(text) == size


def test_storages_count_once_and_under_their_first_kind():
    weight = torch.zeros(1000)
    named = [
        ("parameters", "a", weight),
        ("parameters", "tied to a", weight),
        ("parameters", "b", torch.zeros(3000)),
        ("gradients", "view of a", weight[10:20]),
        ("gradients", "c", torch.zeros(2000)),
        ("buffers", "empty", torch.zeros(0)),
        ("buffers", "elsewhere", torch.zeros(5, device="meta")),
    ]
    found = holders.count(named, torch.device("cpu"))
    assert [(holder.kind, holder.bytes) for holder in found] == [("parameters", 16000), ("gradients", 8000)]
    assert found[0].largest == (("b", 12000), ("a and 1 more", 4000))
    assert str(found[0]) == "parameters 15.6 KiB (b 11.7 KiB, a and 1 more 3.9 KiB)"


def test_the_memory_of_a_sparse_gradient_and_of_one_still_being_reduced_counts():
    sparse = torch.sparse_coo_tensor([[0, 2]], torch.ones(2, 3), (5, 3), check_invariants=True)
    named = [("gradients", "sparse", sparse), ("gradients", "late", AsyncCollectiveTensor(torch.ones(1000)))]
    (found,) = holders.count(named, torch.device("cpu"))
    assert found.largest == (("late", 4000), ("sparse", 24), ("sparse", 16))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("greedy", ["forward", "backward"])
def test_the_error_says_who_where_and_what_to_do_and_training_goes_on(stage, greedy):
    inputs = torch.ones(4, 8)
    with polyscale.initialize(_Model(), config=_config(stage)) as engine:
        for _ in range(2):
            engine.backward(engine(inputs))
            engine.step()
        with pytest.raises(torch.OutOfMemoryError) as caught:
            engine.backward(engine(inputs, greedy))
        error = caught.value
        assert isinstance(error, OutOfMemoryError)
        assert isinstance(error, PolyscaleError)
        assert f"Out of memory on cpu (rank 0) in {greedy}" in str(error)
        assert "4294967296.0 GiB more" in str(error)
        assert "optimizer states" in error.why and "exp_avg of blocks.0.0.weight" in error.why
        assert "train_micro_batch_size_per_gpu 4 -> 2" in error.fix
        kinds = {holder.kind: holder.bytes for holder in error.report.holders}
        assert kinds["parameters"] == 2 * (64 + 8) * 4
        assert sum(kinds.values()) == error.report.allocated
        engine.backward(engine(inputs))
        engine.step()
        found = dict(engine.parameters_store.iter_full())
    with polyscale.initialize(_Model(), config=_config(stage)) as engine:
        for _ in range(3):
            engine.backward(engine(inputs))
            engine.step()
        for name, value in engine.parameters_store.iter_full():
            assert torch.equal(found[name], value)


def test_the_error_crosses_processes_with_its_report():
    with polyscale.initialize(_Model(), config=_config()) as engine:
        error = _raise(lambda: engine(torch.ones(4, 8), "forward"))
        again = pickle.loads(pickle.dumps(error))
        assert type(again) is type(error)
        assert str(again) == str(error)
        assert again.report == error.report


def test_who_holds_the_error_does_not_hold_the_activations():
    alive = []

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x):
            hidden = self.linear(x).tanh()
            alive.append(weakref.ref(hidden))
            torch.empty(HUGE)
            return hidden.sum()

    with polyscale.initialize(Model(), config=_config()) as engine:
        error = _raise(lambda: engine(torch.ones(4, 8)))
        gc.collect()
        assert alive[0]() is None
        assert "torch.empty(HUGE)" in "".join(traceback.format_exception(error)), "the lines are still told"


@pytest.mark.parametrize("stage", [0, 3])
def test_a_closed_engine_lets_go_of_the_optimizer_at_once(stage):
    engine = polyscale.initialize(_Model(), config=_config(stage))
    engine.backward(engine(torch.ones(4, 8)))
    engine.step()
    optimizer = weakref.ref(engine.optimizer)
    gc.collect()
    gc.disable()
    try:
        engine.close()
        assert optimizer() is None
    finally:
        gc.enable()


def test_advice_applies_to_the_configuration():
    model, x = _Model(), torch.ones(1, 8)
    with polyscale.initialize(model, config=_config(3, train_micro_batch_size_per_gpu=1)) as engine:
        fix = _raise(lambda: engine(x, "forward")).fix
        assert "micro_batch" not in fix, "it is 1 already"
        assert "zero_optimization.stage" not in fix, "it is 3 already"
        assert "recompute" in fix
        for module in model.modules():
            module.gradient_checkpointing = True
        assert "recompute" not in _raise(lambda: engine(x, "forward")).fix


def test_a_loss_function_that_runs_out_is_explained():
    def greedy(output, target):
        return torch.empty(HUGE)

    with polyscale.initialize(_Model(), config=_config(), loss_fn=greedy) as engine:
        batch = (torch.ones(4, 8), torch.ones(4))
        error = _raise(lambda: engine.train_batch(iter([batch])))
        assert "in loss" in str(error)


def test_an_optimizer_that_cannot_be_made_is_explained():
    def optimizer(parameters):
        torch.empty(HUGE)

    error = _raise(lambda: polyscale.initialize(_Model(), config=_config(), optimizer=optimizer))
    assert isinstance(error, OutOfMemoryError)
    assert "in initialize" in str(error) and "partitioned_init" in error.fix
    assert {holder.kind for holder in error.report.holders} >= {"parameters"}


class _Greedy(torch.optim.Optimizer):
    """Writes one weight, then asks for too much, in the step that it is told to."""

    granularity = "element"

    def __init__(self, params):
        super().__init__(params, {})
        self.greedy = False

    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.sub_(parameter.grad, alpha=0.1)
                if self.greedy:
                    torch.empty(HUGE)


@pytest.mark.parametrize("stage", [0, 2])
def test_an_update_that_was_interrupted_in_the_middle_is_told_until_a_load(stage, tmp_path):
    x = torch.ones(4, 8)
    with polyscale.initialize(_Model(), config=_config(stage), optimizer=_Greedy) as engine:
        engine.save(tmp_path)
        before = dict(engine.parameters_store.iter_full())
        engine.optimizer.greedy = True
        engine.backward(engine(x))
        error = _raise(engine.step)
        assert isinstance(error, OutOfMemoryError)
        assert "some weights are new, others old" in error.why
        assert error.fix.startswith("Load a checkpoint")
        for refused in (lambda: engine(x), engine.step, lambda: engine.save(tmp_path, "torn")):
            assert "after" in _raise(refused).given
        assert "interrupted in the middle" in _raise(lambda: engine.export(tmp_path / "model.safetensors")).given
        assert engine.steps == 0
        engine.load(tmp_path)
        for name, value in engine.parameters_store.iter_full():
            assert torch.equal(before[name], value)
        engine.optimizer.greedy = False
        engine.backward(engine(x))
        assert engine.step()


class _Half(torch.optim.AdamW):
    """Runs out of memory when it makes the states of its second parameter, or behind its computations."""

    where = ""

    def _init_group(self, group, *rest):
        if self.where == "states":
            first = group["params"][0]
            self.state[first]["exp_avg"] = torch.zeros_like(first)
            torch.empty(HUGE)
        return super()._init_group(group, *rest)

    def step(self, closure=None):
        super().step(closure)
        if self.where == "end":
            torch.empty(HUGE)


def test_an_interrupted_step_counts_as_undone_only_while_states_are_made():
    first, second = (nn.Parameter(torch.ones(3)) for _ in range(2))
    optimizer = _Half([first, second])
    for parameter in (first, second):
        parameter.grad = torch.ones(3)
    before = Intact(optimizer)
    optimizer.where = "states"
    assert before.restore(_raise(optimizer.step))
    assert not optimizer.state, "a state that was only begun would break the next step"
    optimizer.where = "end"
    assert not before.restore(_raise(optimizer.step))
    assert set(optimizer.state) == {first, second}
    kept = {name: value.clone() for name, value in optimizer.state[first].items()}
    optimizer.where = "states"
    assert Intact(optimizer).restore(_raise(optimizer.step))
    assert set(optimizer.state) == {first, second}
    assert optimizer.state[first].keys() == kept.keys()
