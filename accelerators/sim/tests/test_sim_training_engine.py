"""Training through the engine on the simulated device: resume, precisions, starts, optimizers made before."""

import copy

import pytest
import torch
from torch import nn

import polyscale
from polyscale.testing import ranks

STAGES = (0, 1, 2, 3)
QUICK = [*(("fp32", stage) for stage in STAGES), ("bf16", 3), ("fp16", 2)]
ALL = [(dtype, stage) for dtype in ("fp32", "bf16", "fp16") for stage in STAGES]
RESUMED = [case if case in QUICK else pytest.param(*case, marks=pytest.mark.long) for case in ALL]
FIRST, SECOND = 2, 2


def on_sim(function, *args, **kwargs):
    return ranks(2, accelerator="sim").run(function, *args, **kwargs)


class Net(nn.Module):
    """Dropout, a buffer that changes, a tied weight."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(13, 8)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.2), nn.Linear(16, 8)) for _ in range(2)
        )
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 13, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        hidden = self.embed(x)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return nn.functional.cross_entropy(self.head(self.norm(hidden)), x)


def config(stage, **extra):
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
        "zero_optimization": {"stage": stage},
        "gradient_clipping": 1.0,
        "backends": {"accelerator": "sim"},
        **extra,
    }


def make(stage, seed=7, **extra):
    torch.manual_seed(3)
    return polyscale.initialize(Net(), config=config(stage, **extra), data=torch.arange(400) % 13, seed=seed)


def train(engine, updates):
    iterator = iter(engine.data)
    return [(float(engine.train_batch(iterator)), engine.grad_norm, engine.samples) for _ in range(updates)]


def state(engine):
    store = engine.parameters_store
    tensors = {**dict(store.iter_full()), **{f"exp_avg of {name}": value for name, value in store.iter_full("exp_avg")}}
    tensors["running_mean"] = engine.module.norm.running_mean
    tensors["device generator"] = torch.get_device_module("sim").get_rng_state()
    assert all(tensor.device.type == "sim" for name, tensor in tensors.items() if name != "device generator")
    return {name: tensor.cpu() for name, tensor in tensors.items()}


def stop_and_resume(folder, stage, extra):
    with make(stage, **extra) as engine:
        assert engine.device == torch.device("sim", engine.topology.rank)
        train(engine, FIRST)
        engine.save(folder)
        expected = train(engine, SECOND), state(engine)
    with make(stage, seed=99, **extra) as engine:
        engine.load(folder)
        found = train(engine, SECOND), state(engine)
    return expected, found


@pytest.mark.parametrize(("dtype", "stage"), RESUMED)
def test_resuming_equals_going_on(tmp_path, stage, dtype):
    extra = {} if dtype == "fp32" else {dtype: {"enabled": True}}
    for (history, expected), (resumed, found) in on_sim(stop_and_resume, str(tmp_path), stage, extra):
        assert history == resumed
        for name, value in expected.items():
            assert torch.equal(value, found[name]), name


def elsewhere(folder, stage):
    with make(stage) as engine:
        train(engine, FIRST)
        engine.save(folder)
        return {name: value.cpu() for name, value in engine.parameters_store.iter_full()}


def load_on_cpu(folder, stage):
    torch.manual_seed(3)
    with polyscale.initialize(Net(), config={**config(stage), "backends": {"accelerator": "cpu"}}) as engine:
        engine.load(folder)
        return {name: value.cpu() for name, value in engine.parameters_store.iter_full()}


@pytest.mark.parametrize(("saved", "loaded"), [(3, 0), (0, 2)])
def test_a_checkpoint_of_the_device_loads_on_the_cpu(tmp_path, saved, loaded):
    expected = on_sim(elsewhere, str(tmp_path), saved)[0]
    for found in ranks(2).run(load_on_cpu, str(tmp_path), loaded):
        assert all(torch.equal(value, found[name]) for name, value in expected.items())


def starts(start, stage):
    torch.manual_seed(5)
    if start == "deferred":
        with polyscale.partitioned_init():
            model = Net()
    elif start == "meta":
        with torch.device("meta"):
            model = Net()
    else:
        model = Net()
    with polyscale.initialize(model, config=config(stage), seed=11) as engine:
        loss = engine(torch.arange(8).view(2, 4).flatten()).item()
        return {name: value.cpu() for name, value in engine.parameters_store.iter_full()}, loss


@pytest.mark.parametrize("start", ["eager", "deferred", "meta"])
def test_weights_start_as_on_the_cpu_whatever_the_model_was_built_on(start):
    def same(one, two):
        return all(torch.equal(value, two[name]) for name, value in one.items())

    torch.manual_seed(5)
    eager = dict(Net().named_parameters())
    first = on_sim(starts, start, 0)[0][0]
    assert start == "meta" or same(eager, first)
    for stage in (1, 3):
        for found, loss in on_sim(starts, start, stage):
            assert same(first, found)
            assert loss == loss


def own_optimizer(stage):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    model[0].weight.tag = "kept"
    model[2].bias = model[2].bias.requires_grad_(False)
    plain = copy.deepcopy(model)
    optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.5)
    settings = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": stage}}
    settings["backends"] = {"accelerator": "sim"}
    with polyscale.initialize(model, config=settings, optimizer=optimizer) as engine:
        assert engine.optimizer is optimizer
        if stage == 0:
            assert next(engine.module.parameters()).tag == "kept"
        for _ in range(2):
            engine.backward(engine(torch.ones(2, 4)).square().mean())
            engine.step()
        found = {name: value.cpu() for name, value in engine.parameters_store.iter_full()}
    plain_optimizer = torch.optim.SGD((p for p in plain.parameters() if p.requires_grad), lr=0.5)
    for _ in range(2):
        plain_optimizer.zero_grad()
        plain(torch.ones(2, 4)).square().mean().backward()
        plain_optimizer.step()
    for name, value in plain.named_parameters():
        torch.testing.assert_close(found[name], value.detach())


@pytest.mark.parametrize("stage", STAGES)
def test_an_optimizer_made_before_the_move_trains_what_moved(stage):
    on_sim(own_optimizer, stage)


def recurrent(start):
    torch.manual_seed(0)
    with torch.device(start):
        model = nn.RNN(4, 4)
    settings = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}}
    settings["backends"] = {"accelerator": "sim"}
    with polyscale.initialize(model, config=settings, seed=0) as engine:
        own = dict(engine.module.named_parameters())
        assert all(any(weight is value for value in own.values()) for weight in engine.module._flat_weights)
        before = own["weight_hh_l0"].detach().clone()
        engine.backward(engine(torch.ones(3, 1, 4))[0].sum())
        engine.step()
        assert not torch.equal(before, own["weight_hh_l0"])


@pytest.mark.parametrize("start", ["cpu", "meta"])
def test_modules_that_keep_lists_of_their_parameters_keep_the_new_ones(start):
    on_sim(recurrent, start)


def overflow(stage):
    with make(stage, fp16={"enabled": True, "initial_scale_power": 40, "hysteresis": 1}) as engine:
        before = state(engine)
        stepped = []
        for _ in range(2):
            engine.backward(engine(torch.arange(4)))
            stepped.append(engine.step())
        unchanged = all(torch.equal(value, before[name]) for name, value in state(engine).items() if "." in name)
        return stepped, engine.skipped, unchanged


@pytest.mark.parametrize("stage", (0, 3))
def test_an_fp16_overflow_skips_the_update_and_lowers_the_scale(stage):
    for stepped, skipped, unchanged in on_sim(overflow, stage):
        assert stepped == [False, False]
        assert skipped == 1
        assert unchanged


def pinned_batches():
    from polyscale_sim import faults

    faults.late(True)
    try:
        data = polyscale.data.loader([torch.full((4,), float(n)) for n in range(8)], shuffle=False, pin_memory=True)
        settings = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
        settings["backends"] = {"accelerator": "sim"}
        torch.manual_seed(0)
        with polyscale.initialize(nn.Linear(4, 1), config=settings) as engine:
            losses = []
            for batch in data:
                assert batch.is_pinned()
                loss = engine(batch).square().mean()  # moved to the device without blocking
                engine.backward(loss)
                engine.step()
                losses.append(loss.item())
        return losses
    finally:
        faults.late(False)


def test_pinned_batches_are_read_behind_their_late_copy():
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = []
    for n in range(8):
        loss = model(torch.full((1, 4), float(n))).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    for found in on_sim(pinned_batches):
        assert found == pytest.approx(expected, rel=1e-5)


def optimizer_of(kind, params, accelerator):
    torch.manual_seed(0)
    settings = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": kind, "params": {"lr": 0.01, **params}}}
    settings["backends"] = {"accelerator": accelerator}
    with polyscale.initialize(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)), config=settings) as engine:
        for n in range(3):
            engine.backward(engine(torch.full((2, 4), float(n))).square().mean())
            engine.step()
        return {name: value.cpu() for name, value in engine.parameters_store.iter_full()}


@pytest.mark.parametrize(
    ("kind", "params"),
    [("Adam", {}), ("AdamW", {"fused": True}), ("FusedAdam", {}), ("SGD", {"momentum": 0.9}), ("Adagrad", {})],
    ids=str,
)
def test_optimizers_step_as_on_the_cpu(kind, params):
    expected = ranks(1).run(optimizer_of, kind, params, "cpu")[0]
    found = ranks(1, accelerator="sim").run(optimizer_of, kind, params, "sim")[0]
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-7)
