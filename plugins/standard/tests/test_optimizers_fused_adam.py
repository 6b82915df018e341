"""FusedAdam and FusedAdamW against torch.optim on whole tensors, with the kernel and without."""

import copy
import os
import subprocess
import sys

import pytest
import torch

import polyscale
from polyscale import PluginContext
from polyscale.errors import ConfigError, UnsupportedError
from polyscale.interfaces.optimizer import OptimizerFactory, OptimizerGroup
from polyscale.testing import ranks
from polyscale_standard import optimizers
from polyscale_standard.optimizers.uncorrected_adam import UncorrectedAdam

SHAPES = {"matrix": (5, 3), "vector": (7,), "empty": (0, 4), "scalar": (), "long": (3001,)}
PLUGINS = {"fusedadam": optimizers.FusedAdamPlugin, "fusedadamw": optimizers.FusedAdamWPlugin}
CLOSE = {torch.float64: {"rtol": 1e-13, "atol": 1e-14}, torch.float32: {"rtol": 2e-5, "atol": 1e-6}}


def factory_of(name):
    factory = PLUGINS[name]().polyscale_optimizer(PluginContext(name))
    assert isinstance(factory, OptimizerFactory) and factory.granularity == "element"
    return factory


def parameters(dtype):
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.nn.Parameter(torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype))
        for name, shape in SHAPES.items()
    }


def train(optimizer, params, steps=4, seed=1):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for param in params.values():
            param.grad = torch.randn(param.shape, dtype=torch.float64, generator=generator).to(param.dtype)
        optimizer.step()


def built(name, params, settings):
    factory = factory_of(name)
    return factory.build([OptimizerGroup(dict(params))], factory.check(settings))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["fp64", "fp32"])
@pytest.mark.parametrize(
    ("name", "settings", "reference"),
    [
        ("fusedadam", {}, torch.optim.AdamW),
        ("fusedadam", {"weight_decay": 0.1}, torch.optim.AdamW),
        ("fusedadam", {"weight_decay": 0.1, "adam_w_mode": False}, torch.optim.Adam),
        ("fusedadamw", {"betas": [0.8, 0.95], "eps": 1e-6, "weight_decay": 0.1, "maximize": True}, torch.optim.AdamW),
    ],
)
def test_equals_torch_on_whole_tensors(name, settings, reference, dtype):
    params, expected = parameters(dtype), parameters(dtype)
    train(built(name, params, {"lr": 0.1, **settings}), params)
    plain = {"lr": 0.1, "weight_decay": 0.0} | {k: v for k, v in settings.items() if k != "adam_w_mode"}
    train(reference(expected.values(), foreach=False, **plain), expected)
    for key in SHAPES:
        torch.testing.assert_close(params[key], expected[key], **CLOSE[dtype])
        assert params[key].numel() == 0 or not torch.equal(params[key], parameters(dtype)[key])


@pytest.mark.parametrize("decoupled", [True, False])
def test_without_bias_correction_it_equals_the_unfused_form(decoupled):
    params, expected = parameters(torch.float64), parameters(torch.float64)
    options = {"lr": 0.1, "weight_decay": 0.1, "bias_correction": False, "adam_w_mode": decoupled}
    train(built("fusedadam", params, options), params)
    settings = {"lr": 0.1, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1, "maximize": False}
    train(UncorrectedAdam(list(expected.values()), decoupled=decoupled, **settings), expected)
    for key in SHAPES:
        torch.testing.assert_close(params[key], expected[key], rtol=1e-12, atol=1e-13)


def test_a_parameter_without_gradient_does_not_move():
    params = parameters(torch.float32)
    optimizer = built("fusedadamw", params, {"lr": 0.1, "weight_decay": 0.5})
    train(optimizer, params)
    before, state = params["matrix"].detach().clone(), copy.deepcopy(optimizer.state[params["matrix"]])
    params["matrix"].grad = None
    optimizer.step()
    assert torch.equal(params["matrix"], before)
    assert all(torch.equal(optimizer.state[params["matrix"]][key], state[key]) for key in state)
    assert {key: value.item() for key, value in state.items() if key == "step"} == {"step": 4.0}


@pytest.mark.parametrize("to_fused", [True, False], ids=["from torch", "to torch"])
def test_a_state_dict_carries_over(to_fused):
    one, two = parameters(torch.float32), parameters(torch.float32)
    settings = {"lr": 0.01, "weight_decay": 0.1}
    pair = [torch.optim.AdamW(one.items(), fused=True, **settings), built("fusedadamw", two, settings)]
    if not to_fused:
        one, two = two, one
        pair.reverse()
    train(pair[0], one)
    pair[1].load_state_dict(copy.deepcopy(pair[0].state_dict()))
    for key in SHAPES:
        two[key].data.copy_(one[key].data)
    for optimizer, params in zip(pair, (one, two), strict=True):
        train(optimizer, params, seed=2)
    for key in SHAPES:
        torch.testing.assert_close(one[key], two[key], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("before", "after"), [("AdamW", "FusedAdamW"), ("FusedAdam", "Adam")])
def test_a_checkpoint_carries_over(tmp_path, before, after):
    def engine_of(name):
        torch.manual_seed(0)
        options = {"lr": 0.01, "weight_decay": 0.1}
        config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": name, "params": options}}
        return polyscale.initialize(torch.nn.Linear(16, 8), config=config)

    def steps(engine, count):
        for number in range(count):
            inputs = torch.randn(4, 16, generator=torch.Generator().manual_seed(number))
            engine.backward((engine(inputs) - 1).square().mean())
            engine.step()
        return {name: value.clone() for name, value in engine.parameters_store.iter_full()}

    with engine_of(before) as engine:
        steps(engine, 3)
        engine.save(str(tmp_path / "checkpoint"))
        right = steps(engine, 3)
    with engine_of(after) as engine:
        engine.load(str(tmp_path / "checkpoint"))
        found = steps(engine, 3)
        assert type(engine.optimizer).__module__.endswith("fused_adam_step") == after.startswith("Fused")
    for name, value in right.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)


def test_wrong_hyper_parameters_are_refused():
    with pytest.raises(UnsupportedError, match=r'amsgrad=true.*"type": "AdamW"'):
        factory_of("fusedadam").check({"amsgrad": True})
    with pytest.raises(ConfigError, match="Did you mean 'betas'"):
        factory_of("fusedadamw").check({"beta": [0.9, 0.99]})
    with pytest.raises(ConfigError, match=r"optimizer\.params\.adam_w_mode"):
        factory = factory_of("fusedadam")
        factory.build([OptimizerGroup(parameters(torch.float32), {"adam_w_mode": False})], factory.check({}))


def test_groups_have_their_own_hyper_parameters_and_an_empty_rank_steps():
    params, factory = parameters(torch.float32), factory_of("fusedadamw")
    groups = [OptimizerGroup({"matrix": params["matrix"]}, {"lr": 0.0}), OptimizerGroup({"vector": params["vector"]})]
    optimizer = factory.build(groups, factory.check({"lr": 0.1}))
    start = {name: param.detach().clone() for name, param in params.items()}
    train(optimizer, params)
    moved = {name for name in SHAPES if not torch.equal(start[name], params[name])}
    assert moved == {"vector"}
    factory.build([], factory.check({})).step()


def _model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))


def _inputs():
    return torch.randn(8, 7, generator=torch.Generator().manual_seed(1))


def _train_on_a_rank(stage):
    options = {"lr": 0.05, "weight_decay": 0.1}
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "FusedAdamW", "params": options},
        "zero_optimization": {"stage": stage},
    }
    with polyscale.initialize(_model(), config=config) as engine:
        for _ in range(4):
            mine = _inputs().chunk(2)[engine.topology.rank]
            engine.backward((engine(mine) - 1).square().mean())
            engine.step()
        return dict(engine.parameters_store.iter_full())


@pytest.mark.parametrize("stage", [0, 3])
def test_shards_on_two_ranks_are_updated_as_one_process_does(stage):
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)
    for _ in range(4):
        optimizer.zero_grad()
        (model(_inputs()) - 1).square().mean().backward()
        optimizer.step()
    for weights in ranks(2).run(_train_on_a_rank, stage):
        for name, value in model.named_parameters():
            torch.testing.assert_close(weights[name], value.detach(), rtol=1e-5, atol=1e-5)


WITHOUT_COMPILER = """
import torch, polyscale
torch.manual_seed(0)
config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "FusedAdam", "params": {"lr": 0.1}}}
model, expected = torch.nn.Linear(4, 1), torch.nn.Linear(4, 1)
expected.load_state_dict(model.state_dict())
optimizer = torch.optim.AdamW(expected.parameters(), lr=0.1, weight_decay=0.0)
with polyscale.initialize(model, config=config) as engine:
    for _ in range(3):
        engine.backward(engine(torch.ones(2, 4)).square().mean())
        engine.step()
        optimizer.zero_grad()
        expected(torch.ones(2, 4)).square().mean().backward()
        optimizer.step()
    weights = dict(engine.parameters_store.iter_full())
torch.testing.assert_close(weights["weight"], expected.weight.detach())
"""


def test_it_trains_without_a_compiler(tmp_path):
    kept = {key: value for key, value in os.environ.items() if key not in ("CXX", "CC")}
    environment = {**kept, "PATH": str(tmp_path), "POLYSCALE_CACHE": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", WITHOUT_COMPILER], env=environment, capture_output=True, text=True,
        timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert not list((tmp_path / "cache").glob("**/*.so"))
