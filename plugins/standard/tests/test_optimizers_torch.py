"""Adam, AdamW, SGD, Adagrad and torch's own by name, against torch.optim on whole tensors in float64."""

import copy

import pytest
import torch

from polyscale import PluginContext
from polyscale.errors import ConfigError, PolyscaleError, UnsupportedError
from polyscale.interfaces.optimizer import OptimizerFactory, OptimizerGroup
from polyscale_standard import optimizers

SHAPES = {"matrix": (5, 3), "vector": (7,), "empty": (0, 4), "scalar": ()}
STEPS = 4


def factory_of(plugin, **options):
    factory = plugin().polyscale_optimizer(PluginContext("x", options=options))
    assert isinstance(factory, OptimizerFactory)
    return factory


def parameters(dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.nn.Parameter(torch.randn(shape, dtype=dtype, generator=generator)) for name, shape in SHAPES.items()
    }


def train(optimizer, params, steps=STEPS):
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        for param in params.values():
            param.grad = torch.randn(param.shape, dtype=param.dtype, generator=generator)
        optimizer.step()


def built(factory, params, settings, options=None):
    return factory.build([OptimizerGroup(dict(params), options or {})], factory.check(settings), None)


CASES = [
    pytest.param(optimizers.AdamPlugin, {}, torch.optim.AdamW, {"weight_decay": 0.0}, id="adam"),
    pytest.param(optimizers.AdamPlugin, {"weight_decay": 0.1}, torch.optim.AdamW, {}, id="adam decouples decay"),
    pytest.param(
        optimizers.AdamPlugin, {"weight_decay": 0.1, "adam_w_mode": False}, torch.optim.Adam, {}, id="adam, L2 decay"
    ),
    pytest.param(
        optimizers.AdamPlugin, {"torch_adam": True, "fp32_optimizer_states": True}, torch.optim.Adam, {}, id="no effect"
    ),
    pytest.param(
        optimizers.AdamWPlugin,
        {"betas": [0.8, 0.95], "eps": 1e-6, "amsgrad": True, "weight_decay": 0.1},
        torch.optim.AdamW,
        {},
        id="adamw",
    ),
    pytest.param(optimizers.AdamWPlugin, {"fused": False, "weight_decay": 0.1}, torch.optim.AdamW, {}, id="foreach"),
    pytest.param(optimizers.SgdPlugin, {}, torch.optim.SGD, {}, id="sgd"),
    pytest.param(
        optimizers.SgdPlugin,
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
        torch.optim.SGD,
        {},
        id="nesterov",
    ),
    pytest.param(optimizers.SgdPlugin, {"momentum": 0.9, "dampening": 0.5}, torch.optim.SGD, {}, id="dampening"),
    pytest.param(
        optimizers.AdagradPlugin,
        {"lr_decay": 0.1, "weight_decay": 0.1, "initial_accumulator_value": 0.5},
        torch.optim.Adagrad,
        {},
        id="adagrad",
    ),
]
OURS = ("adam_w_mode", "torch_adam", "fp32_optimizer_states", "fused", "class")


@pytest.mark.parametrize(("plugin", "settings", "reference", "defaults"), CASES)
def test_equals_torch_on_whole_tensors(plugin, settings, reference, defaults):
    params, expected = parameters(), parameters()
    train(built(factory_of(plugin), params, {"lr": 0.1, **settings}), params)
    plain = {key: value for key, value in ({"lr": 0.1} | defaults | settings).items() if key not in OURS}
    train(reference(expected.values(), foreach=False, **plain), expected)
    for name in SHAPES:
        torch.testing.assert_close(params[name], expected[name], rtol=1e-13, atol=1e-14)
        assert not SHAPES[name] or params[name].numel() == 0 or not torch.equal(params[name], parameters()[name])


@pytest.mark.parametrize(
    "plugin",
    [
        optimizers.AdamPlugin,
        optimizers.AdamWPlugin,
        optimizers.SgdPlugin,
        optimizers.AdagradPlugin,
        optimizers.LionPlugin,
    ],
)
def test_shards_of_a_tensor_are_updated_as_the_whole(plugin):
    factory = factory_of(plugin)
    assert factory.granularity == "element"
    generator = torch.Generator().manual_seed(2)
    value, grad = (torch.randn(13, dtype=torch.float64, generator=generator) for _ in range(2))
    settings = {"lr": 0.1, "weight_decay": 0.1}
    whole = {"w": torch.nn.Parameter(value.clone())}
    shards = {f"w{i}": torch.nn.Parameter(piece.clone()) for i, piece in enumerate(value.split([5, 0, 8]))}
    for params, grads in ((whole, [grad]), (shards, grad.split([5, 0, 8]))):
        optimizer = built(factory, params, settings)
        for _ in range(3):
            for param, piece in zip(params.values(), grads, strict=True):
                param.grad = piece.clone()
            optimizer.step()
    torch.testing.assert_close(torch.cat(list(shards.values())), whole["w"], rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize(
    ("plugin", "settings"),
    [
        (optimizers.AdamPlugin, {}),
        (optimizers.AdamPlugin, {"bias_correction": False}),
        (optimizers.SgdPlugin, {"momentum": 0.9}),
        (optimizers.AdagradPlugin, {}),
        (optimizers.LionPlugin, {}),
    ],
)
def test_a_parameter_without_gradient_does_not_move(plugin, settings):
    params = parameters()
    optimizer = built(factory_of(plugin), params, {"lr": 0.1, "weight_decay": 0.5, **settings})
    train(optimizer, params)  # momentum exists now, and must not carry the parameter on
    before = params["matrix"].detach().clone()
    state = {key: torch.as_tensor(value).clone() for key, value in optimizer.state[params["matrix"]].items()}
    params["matrix"].grad = None
    params["vector"].grad = torch.ones(7, dtype=torch.float64)
    optimizer.step()
    assert torch.equal(params["matrix"], before)
    for key, value in optimizer.state[params["matrix"]].items():
        assert torch.equal(torch.as_tensor(value), state[key]), key


def test_fused_is_used_where_it_works_and_foreach_elsewhere():
    params = parameters()
    assert built(factory_of(optimizers.AdamWPlugin), params, {}).param_groups[0]["fused"] is True
    unfused = built(factory_of(optimizers.AdamWPlugin), params, {"fused": False}).param_groups[0]
    assert (unfused["fused"], unfused["foreach"]) == (None, True)
    on_meta = {"w": torch.nn.Parameter(torch.empty(2, device="meta"))}
    fallen_back = built(factory_of(optimizers.SgdPlugin), on_meta, {}).param_groups[0]
    assert (fallen_back["fused"], fallen_back["foreach"]) == (None, True)
    with pytest.raises(UnsupportedError, match="no fused SGD for meta"):
        built(factory_of(optimizers.SgdPlugin), on_meta, {"fused": True})


def test_adam_without_bias_correction_follows_the_formula():
    beta1, beta2, lr, eps, decay = 0.9, 0.99, 0.1, 1e-8, 0.2
    for decoupled in (True, False):
        params, expected = parameters(), parameters()
        settings = {"lr": lr, "betas": [beta1, beta2], "eps": eps, "weight_decay": decay, "bias_correction": False}
        train(built(factory_of(optimizers.AdamPlugin), params, settings | {"adam_w_mode": decoupled}), params)
        generator = torch.Generator().manual_seed(1)
        m = {name: torch.zeros_like(p.data) for name, p in expected.items()}
        v = {name: torch.zeros_like(p.data) for name, p in expected.items()}
        for _ in range(STEPS):
            for name, p in expected.items():
                g = torch.randn(p.shape, dtype=p.dtype, generator=generator)
                theta = p.data
                g = g if decoupled else g + decay * theta
                m[name] = beta1 * m[name] + (1 - beta1) * g
                v[name] = beta2 * v[name] + (1 - beta2) * g * g
                decayed = theta - lr * decay * theta if decoupled else theta
                p.data = decayed - lr * m[name] / (v[name].sqrt() + eps)
        for name in SHAPES:
            torch.testing.assert_close(params[name], expected[name], rtol=1e-13, atol=1e-14)


def test_groups_have_their_own_hyper_parameters_and_names():
    params = parameters()
    factory = factory_of(optimizers.AdamWPlugin)
    groups = [
        OptimizerGroup({"matrix": params["matrix"]}, {"lr": 0.5, "weight_decay": 0.3}),
        OptimizerGroup({}),
        OptimizerGroup({"vector": params["vector"]}),
    ]
    optimizer = factory.build(groups, factory.check({"lr": 0.1, "weight_decay": 0.2}), None)
    seen = [(group["lr"], group["weight_decay"], group["param_names"]) for group in optimizer.param_groups]
    assert seen == [(0.5, 0.3, ["matrix"]), (0.1, 0.2, ["vector"])]


def test_state_is_restored_from_a_state_dict():
    for plugin, settings in ((optimizers.AdamPlugin, {"bias_correction": False}), (optimizers.LionPlugin, {})):
        factory = factory_of(plugin)
        one, two = parameters(), parameters()
        first, second = built(factory, one, settings), built(factory, two, settings)
        train(first, one)
        second.load_state_dict(copy.deepcopy(first.state_dict()))
        for name in SHAPES:
            two[name].data.copy_(one[name].data)
        train(first, one, 1)
        train(second, two, 1)
        assert all(torch.equal(one[name], two[name]) for name in SHAPES)


@pytest.mark.parametrize("class_name", ["NAdam", "radam", "RMSprop", "Adamax", "ASGD", "Rprop", "Adadelta"])
def test_any_elementwise_class_of_torch_by_name(class_name):
    factory = factory_of(optimizers.TorchOptimPlugin, **{"class": class_name})
    assert factory.granularity == "element"
    params, expected = parameters(), parameters()
    train(built(factory, params, {"lr": 0.01}), params)
    reference = next(cls for name, cls in vars(torch.optim).items() if name.lower() == class_name.lower())
    train(reference(expected.values(), lr=0.01, foreach=True), expected)
    for name in SHAPES:
        torch.testing.assert_close(params[name], expected[name], rtol=1e-12, atol=1e-13)


def test_a_class_of_torch_that_looks_at_whole_tensors_says_so():
    assert factory_of(optimizers.TorchOptimPlugin, **{"class": "Adafactor"}).granularity == "tensor"


@pytest.mark.parametrize(("name", "instead"), [("LBFGS", "AdamW"), ("SparseAdam", "AdamW"), ("Muon", '"type": "Muon"')])
def test_classes_that_cannot_work_on_shards_are_refused_with_what_works(name, instead):
    with pytest.raises(UnsupportedError, match=instead):
        factory_of(optimizers.TorchOptimPlugin, **{"class": name})


def test_an_unknown_class_names_the_nearest():
    with pytest.raises(ConfigError, match="Did you mean 'RMSprop'"):
        factory_of(optimizers.TorchOptimPlugin, **{"class": "RMSporp"})
    with pytest.raises(ConfigError, match="without a class"):
        factory_of(optimizers.TorchOptimPlugin).check({})


@pytest.mark.parametrize(
    ("plugin", "settings", "message"),
    [
        (optimizers.AdamPlugin, {"beta": [0.9, 0.99]}, "Did you mean 'betas'"),
        (optimizers.AdamPlugin, {"max_grad_norm": 1.0}, "gradient_clipping"),
        (optimizers.AdamPlugin, {"lr": -0.1}, "lr=-0.1.*at least 0"),
        (optimizers.AdamPlugin, {"lr": "auto"}, "lr='auto'"),
        (optimizers.AdamPlugin, {"lr": float("nan")}, "lr=nan"),
        (optimizers.AdamPlugin, {"lr": True}, "lr=True"),
        (optimizers.AdamPlugin, {"betas": [False, 0.9]}, "two numbers"),
        (optimizers.AdamPlugin, {"lrr": 1, "lr": "fast"}, "2 problems.*lrr.*lr='fast'"),
        (optimizers.AdamPlugin, {"betas": [0.9, 1.0]}, "below 1"),
        (optimizers.AdamPlugin, {"betas": [0.9]}, "two numbers"),
        (optimizers.AdamPlugin, {"amsgrad": 1}, "true or false"),
        (optimizers.AdamPlugin, {"fp32_optimizer_states": False}, "dtype of the masters"),
        (optimizers.AdamPlugin, {"amsgrad": True, "bias_correction": False}, "corrected moments"),
        (optimizers.SgdPlugin, {"nesterov": True}, "momentum=0"),
        (optimizers.AdagradPlugin, {"amsgrad": True}, "Leave it out"),
        (optimizers.LionPlugin, {"eps": 1e-8}, "no such hyper-parameter"),
        (optimizers.MuonPlugin, {"momentum": 1.0}, "below 1"),
        (optimizers.MuonPlugin, {"ns_dtype": "fp8"}, "one of master, bf16"),
        (optimizers.MuonPlugin, {"ns_steps": 0}, "at least 1"),
        (optimizers.MuonPlugin, {"per_head_muon": True}, "whole"),
    ],
)
def test_wrong_hyper_parameters_are_refused_before_anything_is_built(plugin, settings, message):
    with pytest.raises(PolyscaleError, match=message):
        factory_of(plugin).check(settings)


def test_torch_itself_judges_the_values_of_its_classes():
    factory = factory_of(optimizers.TorchOptimPlugin, **{"class": "NAdam"})
    with pytest.raises(ConfigError, match="Invalid learning rate"):
        factory.check({"lr": -1.0})
    with pytest.raises(ConfigError, match="Did you mean 'momentum_decay'"):
        factory.check({"momentum_deca": 0.1})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": True}, r"optimizer\.params\.lr=True: torch\.optim\.RMSprop expects a finite number"),
        ({"lr": "fast"}, "lr='fast'"),
        ({"lr": float("inf")}, "lr=inf"),
        ({"momentum": "nan"}, "momentum='nan'"),
        ({"centered": "1"}, "true or false"),
    ],
)
def test_classes_of_torch_take_numbers_and_flags_of_their_type_only(settings, message):
    with pytest.raises(ConfigError, match=message):
        factory_of(optimizers.TorchOptimPlugin, **{"class": "RMSprop"}).check(settings)


@pytest.mark.parametrize(
    ("plugin", "options", "text", "number"),
    [
        (optimizers.AdamWPlugin, {}, {"lr": "1e-4", "betas": ["0.8", ".9"]}, {"lr": 1e-4, "betas": (0.8, 0.9)}),
        (optimizers.MuonPlugin, {}, {"ns_steps": "3"}, {"ns_steps": 3}),
        (optimizers.TorchOptimPlugin, {"class": "RMSprop"}, {"lr": "1e-4", "eps": "1E-6"}, {"lr": 1e-4, "eps": 1e-6}),
        (optimizers.TorchOptimPlugin, {"class": "NAdam"}, {"betas": ["0.8", "9e-1"]}, {"betas": [0.8, 0.9]}),
        (optimizers.TorchOptimPlugin, {"class": "Adafactor"}, {"eps": [None, "1e-2"]}, {"eps": [None, 0.01]}),
    ],
)
def test_numbers_may_be_written_as_text(plugin, options, text, number):
    factory = factory_of(plugin, **options)
    assert factory.check(text) == factory.check({}) | number
    assert factory.check_group(text) == number


def test_numbers_of_a_group_may_be_written_as_text():
    params = parameters()
    optimizer = built(factory_of(optimizers.TorchOptimPlugin, **{"class": "RMSprop"}), params, {}, {"lr": "1e-4"})
    assert optimizer.param_groups[0]["lr"] == 1e-4


def test_a_setting_of_the_whole_optimizer_is_refused_in_a_group():
    with pytest.raises(ConfigError, match=r"optimizer\.params\.adam_w_mode"):
        built(factory_of(optimizers.AdamPlugin), parameters(), {}, {"adam_w_mode": False})
    with pytest.raises(ConfigError, match="Did you mean 'lr'"):
        built(factory_of(optimizers.AdamPlugin), parameters(), {}, {"lrr": 1.0})


def test_a_rank_whose_tensors_are_all_empty_still_steps():
    for plugin in (optimizers.AdamPlugin, optimizers.SgdPlugin, optimizers.AdagradPlugin, optimizers.LionPlugin):
        params = {"w": torch.nn.Parameter(torch.empty(0))}
        train(built(factory_of(plugin), params, {}), params)
        factory_of(plugin).build([], factory_of(plugin).check({}), None).step()


@pytest.mark.parametrize("late_in", [1, 2])
@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize(
    "settings",
    [{"dampening": 0.0}, {"dampening": 0.4}, {"nesterov": True}],
    ids=["undamped", "dampened", "nesterov"],
)
def test_a_first_gradient_that_comes_late_starts_a_momentum(settings, maximize, late_in):
    full = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.2, "maximize": maximize, **settings}
    params, expected = parameters(), parameters()
    fused = built(factory_of(optimizers.SgdPlugin), params, full)
    assert fused.param_groups[0]["fused"] is True
    reference = torch.optim.SGD(expected.values(), foreach=False, **full)
    for step in range(late_in + 3):
        grads = {name: torch.full(shape, step + 1.0, dtype=torch.float64) for name, shape in SHAPES.items()}
        if step < late_in:
            del grads["matrix"]
        for optimizer, weights in ((fused, params), (reference, expected)):
            for name, param in weights.items():
                param.grad = grads[name].clone() if name in grads else None
            optimizer.step()
        for name in SHAPES:
            torch.testing.assert_close(params[name], expected[name], rtol=1e-13, atol=1e-14)
