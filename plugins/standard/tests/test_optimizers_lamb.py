"""LAMB against Algorithm 2 of its paper, written out here on whole float64 tensors."""

import dataclasses
import math

import pytest
import torch
from torch import nn

import polyscale
from polyscale import PluginContext
from polyscale.errors import ConfigError, UnsupportedError
from polyscale.interfaces.optimizer import OptimizerFactory, OptimizerGroup
from polyscale.testing import count_collectives, ranks
from polyscale_standard import optimizers

STEPS = 4
SHAPES = {"matrix": (5, 3), "vector": (7,), "empty": (0, 4), "scalar": (), "zero": (4, 2), "bound": (3, 3)}
OPTIONS = {"lr": 0.05, "betas": [0.8, 0.9], "eps": 1e-6, "weight_decay": 0.1}


class WorldOfOne:
    """What a store is when this rank holds everything."""

    def norms(self, *locals):
        return [{name: value.norm() for name, value in mapping.items()} for mapping in locals]


@torch.no_grad()
def paper(
    x, state, g, *, lr, betas, eps, weight_decay, low=0.01, high=10.0, corrected=True, inside=False
):  # fmt: skip
    """One update of one tensor (You et al. 2020, Algorithm 2), whose ratio is held between ``low`` and ``high``."""
    beta1, beta2 = betas
    t = state["t"] = state.get("t", 0) + 1
    state["m"] = beta1 * state.get("m", 0) + (1 - beta1) * g
    state["v"] = beta2 * state.get("v", 0) + (1 - beta2) * g**2
    m = state["m"] / (1 - beta1**t) if corrected else state["m"]
    v = state["v"] / (1 - beta2**t) if corrected else state["v"]
    r = m / (torch.sqrt(v + eps) if inside else torch.sqrt(v) + eps)
    u = r + weight_decay * x
    up, down = math.sqrt((x**2).sum()), math.sqrt((u**2).sum())
    ratio = min(max(up / down, low), high) if up and down else 1.0
    x.copy_(x - lr * ratio * u)


def parameters(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    made = {name: torch.randn(shape, dtype=torch.float64, generator=generator) for name, shape in SHAPES.items()}
    made["zero"].zero_()
    made["bound"] *= 1000
    return {name: nn.Parameter(value.to(dtype)) for name, value in made.items()}


def gradients():
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        yield {name: torch.randn(shape, dtype=torch.float64, generator=generator) for name, shape in SHAPES.items()}


def factory():
    made = optimizers.LambPlugin().polyscale_optimizer(PluginContext("lamb"))
    assert isinstance(made, OptimizerFactory) and made.granularity == "norm"
    return made


def built(params, settings, groups=None):
    made = factory()
    return made.build(groups or [OptimizerGroup(dict(params))], made.check(settings), WorldOfOne())


def train(optimizer, params):
    for grads in gradients():
        for name, param in params.items():
            param.grad = grads[name].to(param.dtype)
        optimizer.step()


def expected_of(**options):
    params = parameters()
    states = {name: {} for name in params}
    for grads in gradients():
        for name, param in params.items():
            paper(param, states[name], grads[name], **options)
    return params


@pytest.mark.parametrize(
    ("settings", "options"),
    [
        ({}, {}),
        ({"bias_correction": False}, {"corrected": False}),
        ({"eps_inside_sqrt": True}, {"inside": True}),
        ({"min_coeff": 0.5, "max_coeff": 2, "max_grad_norm": 0.0}, {"low": 0.5, "high": 2.0}),
    ],
)
def test_follows_algorithm_2_of_the_paper(settings, options):
    params = parameters()
    train(built(params, OPTIONS | settings), params)
    expected = expected_of(**OPTIONS, **options)
    for name in SHAPES:
        torch.testing.assert_close(params[name], expected[name], rtol=1e-12, atol=1e-13)


def test_fp32_is_close_to_it():
    params = parameters(torch.float32)
    train(built(params, OPTIONS), params)
    for name, value in expected_of(**OPTIONS).items():
        torch.testing.assert_close(params[name].double(), value, rtol=1e-5, atol=1e-6)


def test_a_ratio_of_1_is_adamw():
    params, expected = parameters(), parameters()
    settings = {"lr": 0.05, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.1}
    train(built(params, settings | {"min_coeff": 1.0, "max_coeff": 1.0}), params)
    # AdamW decays before its step, LAMB with it: the same but for the order of two roundings.
    train(torch.optim.AdamW(expected.values(), foreach=False, **settings), expected)
    for name in SHAPES:
        torch.testing.assert_close(params[name], expected[name], rtol=1e-12, atol=1e-13)


def test_a_zero_norm_gives_a_ratio_of_1():
    params = parameters()
    optimizer = built(params, OPTIONS | {"min_coeff": 3.0, "weight_decay": 0.0})
    for param in params.values():
        param.grad = torch.ones_like(param)
    params["matrix"].grad.zero_()
    before = params["matrix"].detach().clone()
    optimizer.step()
    assert optimizer.trust_ratios["zero"] == 1.0 and optimizer.trust_ratios["matrix"] == 1.0
    assert optimizer.trust_ratios["empty"] == 1.0
    assert optimizer.trust_ratios["vector"] == 3.0 and optimizer.trust_ratios["bound"] == 10.0
    assert torch.equal(params["matrix"], before), "an update of 0 moves nothing"
    torch.testing.assert_close(params["zero"], torch.full((4, 2), -0.05, dtype=torch.float64), rtol=1e-5, atol=0)


def test_parameters_without_gradient_stand_still_and_count_no_step():
    params = parameters()
    optimizer = built(params, OPTIONS)
    train(optimizer, params)
    before = {name: params[name].detach().clone() for name in ("matrix", "scalar")}
    for name in before:
        params[name].grad = None
    optimizer.step()
    for name, value in before.items():
        assert torch.equal(params[name], value)
        assert int(optimizer.state[params[name]]["step"]) == STEPS
    assert int(optimizer.state[params["vector"]]["step"]) == STEPS + 1
    assert set(optimizer.trust_ratios) == set(SHAPES) - set(before)
    for param in params.values():
        param.grad = None
    optimizer.step()
    assert optimizer.trust_ratios == {}
    built({}, OPTIONS, [OptimizerGroup({})]).step()


def test_groups_have_their_own_hyper_parameters():
    params, made = parameters(), factory()
    own = {"lr": 0.2, "weight_decay": 0.0, "max_coeff": 1.0}
    groups = [OptimizerGroup({"matrix": params.pop("matrix")}, own), OptimizerGroup(dict(params))]
    optimizer = made.build(groups, made.check(OPTIONS), WorldOfOne())
    params["matrix"] = groups[0].params["matrix"]
    train(optimizer, params)
    expected = expected_of(**OPTIONS) | {
        "matrix": expected_of(**OPTIONS | {"lr": 0.2, "weight_decay": 0.0}, high=1.0)["matrix"]
    }
    for name in SHAPES:
        torch.testing.assert_close(params[name], expected[name], rtol=1e-12, atol=1e-13)


def test_wrong_hyper_parameters_are_refused():
    for wrong, words in (
        ({"max_grad_norm": 1.5}, "gradient_clipping: 1.5"),
        ({"amsgrad": True}, "no maximum"),
    ):
        with pytest.raises(UnsupportedError, match=words):
            factory().check(wrong)
    with pytest.raises(ConfigError, match="Did you mean 'max_coeff'"):
        factory().check({"max_coef": 1.0})
    with pytest.raises(ConfigError, match="min_coeff of at most max_coeff"):
        factory().check({"min_coeff": 11})
    with pytest.raises(ConfigError, match=r"min_coeff=0\.01 with max_coeff=0"):
        built({}, {}, [OptimizerGroup(parameters(), {"max_coeff": 0.0})])
    settings = polyscale.load_config({"optimizer": {"type": "Lamb", "params": {"max_grad_norm": 0.0}}})
    assert settings.optimizer.type == "Lamb"


# On ranks.


class Net(nn.Module):
    """Uneven shapes, a scalar, a tied weight, a layer that is used in every other step, and one that never is."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.second = nn.Linear(7, 7)
        self.tied = nn.Linear(7, 7, bias=False)
        self.tied.weight = self.second.weight
        self.branch, self.idle = nn.Linear(7, 7), nn.Linear(3, 3)
        self.norm, self.last = nn.LayerNorm(7), nn.Linear(7, 1)
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, x, branch):
        x = torch.tanh(self.first(x))
        x = x + self.scale * self.tied(torch.tanh(self.second(x)))
        x = x + self.branch(x) if branch else x
        return (self.last(self.norm(x)) - 1).square().mean()


def _model():
    torch.manual_seed(0)
    return Net().double()


def _inputs(step):
    return torch.randn(8, 5, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


GROUPS = {"skip_decay_for_norms_and_biases": True, "groups": [{"match": ["first.*"], "params": {"lr": 0.1}}]}


def _config(stage):
    return {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "Lamb", "params": OPTIONS, **GROUPS},
        "zero_optimization": {"stage": stage},
    }


def _oracle(steps):
    model, states = _model(), {}
    for step in range(steps):
        model.zero_grad()
        model(_inputs(step), step % 2 == 1).backward()
        for name, param in model.named_parameters():
            if param.grad is not None:
                own = OPTIONS | {"lr": 0.1 if name.startswith("first.") else OPTIONS["lr"]}
                if param.ndim < 2:
                    own = own | {"weight_decay": 0.0}
                paper(param, states.setdefault(name, {}), param.grad, **own)
    return {name: value.detach() for name, value in model.named_parameters(remove_duplicate=False)}


def _steps(engine, first, last):
    share = engine.topology.dp_size
    for step in range(first, last):
        engine.backward(engine(_inputs(step).chunk(share)[engine.topology.rank], step % 2 == 1))
        engine.step()
    return dict(engine.parameters_store.iter_full())


def _train(stage):
    with polyscale.initialize(_model(), config=_config(stage)) as engine:
        weights = _steps(engine, 0, STEPS)
        with count_collectives() as collectives:
            for group in engine.optimizer.param_groups:
                group["params"][0].grad = torch.ones_like(group["params"][0])
            engine.optimizer.step()
        return weights, dict(collectives.counts)


def test_one_process_equals_the_paper():
    weights, collectives = _train(0)
    _assert_equal(weights, _oracle(STEPS))
    assert collectives == {}


def _assert_equal(weights, expected):
    assert set(weights) == set(expected)
    for name, value in expected.items():
        torch.testing.assert_close(weights[name], value, rtol=0, atol=1e-11, msg=name)
    assert all(torch.equal(weights[f"idle.{own}"], value) for own, value in _model().idle.named_parameters())


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_two_ranks_equal_the_paper_with_one_all_reduce_for_all_norms(stage):
    expected = _oracle(STEPS)
    for weights, collectives in ranks(2).run(_train, stage):
        _assert_equal(weights, expected)
        assert collectives == ({"all_reduce": 1} if stage else {})


def _save(stage, folder):
    with polyscale.initialize(_model(), config=_config(stage)) as engine:
        _steps(engine, 0, STEPS)
        engine.save(folder)


def _load(stage, folder):
    with polyscale.initialize(_model(), config=_config(stage)) as engine:
        report = engine.load(folder)
        weights = _steps(engine, STEPS, 2 * STEPS)
        states = {name: engine.parameters_store.state_names(name) for name in ("first.weight", "idle.weight")}
        return weights, states, report.restored


@pytest.mark.parametrize(("before", "after"), [(3, 0), pytest.param(0, 2, marks=pytest.mark.long)])
def test_a_checkpoint_of_one_stage_goes_on_at_another(tmp_path, before, after):
    ranks(2).run(_save, before, str(tmp_path / "checkpoint"))
    expected = _oracle(2 * STEPS)
    for weights, states, restored in ranks(2).run(_load, after, str(tmp_path / "checkpoint")):
        assert "optimizer" in restored
        _assert_equal(weights, expected)
        assert set(states["first.weight"]) == {"step", "exp_avg", "exp_avg_sq"} and not states["idle.weight"]


# Norms of the store.


def _norms_of_ranges(shapes):
    """Each rank gives 1-D ranges of flattened tensors, as a store of flat shards would."""
    with polyscale.initialize(_model(), config=_config(0)) as engine:
        store, rank = engine.parameters_store, engine.topology.rank
        store.infos = {
            name: dataclasses.replace(info, multiplicity=2 if name == "scale" else 1)
            for name, info in store.infos.items()
        }
        whole = {name: _tensor(name, shape) for name, shape in shapes.items()}
        locals = {name: value.reshape(-1)[_range(name, value, rank)] for name, value in whole.items()}
        with count_collectives() as collectives:
            found = store.norms(locals, {name: 2 * value for name, value in locals.items()}, {})
        return found, dict(collectives.counts)


def _tensor(name, shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(name))) + 0.1


def _range(name, value, rank):
    """Uneven, empty on one rank, or whole on both."""
    cut = {"first.weight": 11, "second.weight": 0, "scale": value.numel() if rank == 0 else 0}
    at = cut.get(name, value.numel())
    return slice(0, at) if rank == 0 else slice(at, None)


def test_norms_of_ranges_of_flattened_tensors():
    shapes = {"first.weight": (5, 7), "second.weight": (300, 1000), "norm.bias": (7,), "scale": ()}
    for (ones, twos, none), collectives in ranks(2).run(_norms_of_ranges, shapes):
        assert collectives == {"all_reduce": 1} and none == {}
        assert list(ones) == list(twos) == list(shapes)
        for name, shape in shapes.items():
            norm = _tensor(name, shape).double().norm()
            assert ones[name].dtype == torch.float64
            torch.testing.assert_close(ones[name], norm, rtol=3e-7, atol=0)
            torch.testing.assert_close(twos[name], 2 * norm, rtol=3e-7, atol=0)


def test_norms_of_large_tensors_keep_their_digits():
    with polyscale.initialize(nn.Linear(2, 1), config={"train_micro_batch_size_per_gpu": 1}) as engine:
        store = engine.parameters_store
        value = torch.full((4_000_003,), 0.1)
        (found,) = store.norms({"weight": value, "bias": value[:0]})
        assert float(found["weight"]) == pytest.approx(float(value.double().norm()), rel=5e-7)
        assert float(found["bias"]) == 0.0
        (half,) = store.norms({"weight": torch.tensor([300.0, 400.0], dtype=torch.bfloat16)})
        assert float(half["weight"]) == pytest.approx(500, rel=1e-2)


def _tensor_parallel(stage):
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    topology = polyscale.Topology.build(dp_shard=2, tp=2)
    model = _mlp()
    parallelize_module(model, topology.mesh("tp"), {"0": ColwiseParallel(), "2": RowwiseParallel()})
    config = _config(stage)
    config["optimizer"] = {"type": "Lamb", "params": OPTIONS}
    engine = polyscale.initialize(model, config=config, topology=topology)
    for step in range(STEPS):
        engine.backward((engine(_inputs(step).chunk(2)[topology.dp_rank]) - 1).square().mean())
        engine.step()
    weights = dict(engine.parameters_store.iter_full())
    engine.close()
    topology.close()
    return weights


def _mlp():
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 5)).double()


@pytest.mark.long
@pytest.mark.parametrize("stage", [0, 3])
def test_parts_of_tensor_parallel_ranks_count_once(stage):
    model, states = _mlp(), {}
    for step in range(STEPS):
        model.zero_grad()
        (model(_inputs(step)) - 1).square().mean().backward()
        for name, param in model.named_parameters():
            paper(param, states.setdefault(name, {}), param.grad, **OPTIONS)
    for weights in ranks(4).run(_tensor_parallel, stage):
        for name, value in model.named_parameters():
            torch.testing.assert_close(weights[name], value.detach(), rtol=0, atol=1e-11)
