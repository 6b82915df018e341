"""Models and uses that once gave a wrong number without a word: each is right at every stage."""

import pytest
import torch
from engine_line import STAGES, Block, config_of, line_at, weight_of
from torch import nn

import polyscale
from polyscale.testing import ranks


class _Opaque:
    def __init__(self, loss):
        self.loss = loss


class _ReturnsObject(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 1, bias=False)
        nn.init.zeros_(self.layer.weight)

    def forward(self, x):
        return _Opaque(self.layer(x).sum())


def _opaque_output():
    found = {}
    for stage in STAGES:
        with polyscale.initialize(_ReturnsObject(), config=config_of(stage, gradient_accumulation_steps=2)) as engine:
            for value in (1.0, 3.0):
                engine.backward(engine(torch.full((1, 2), value)).loss)
                engine.step()
            found[stage] = engine.parameters_store.get_full("layer.weight").flatten().tolist()
    return found


def test_a_model_whose_output_torch_cannot_look_into_trains():
    for found in ranks(2).run(_opaque_output):
        for stage in STAGES:
            assert found[stage] == pytest.approx([-0.2, -0.2]), stage


def _predivided(replicate):
    found = {}
    for stage in STAGES:
        extra = {"prescale_gradients": True, "gradient_predivide_factor": 2.0}
        with line_at(stage, topology={"dp_replicate": replicate, "dp_shard": -1}, **extra) as engine:
            engine.backward(engine(torch.ones(1, 2)).sum())
            engine.step()
            found[stage] = weight_of(engine)
    return found


@pytest.mark.parametrize(
    ("world", "replicate"),
    [(1, 1), (2, 1), (2, 2), *(pytest.param(4, replicate, marks=pytest.mark.long) for replicate in (2, 4))],
)
def test_predividing_changes_nothing_on_any_mesh(world, replicate):
    for found in ranks(world).run(_predivided, replicate):
        for stage in STAGES:
            assert found[stage] == pytest.approx([-0.1, -0.1]), stage


def _narrow_reduction(key):
    found = {}
    narrow = {
        "communication_data_type": {"communication_data_type": "bf16", "bf16": {"enabled": True}},
        "param_dtype": {"data_types": {"param_dtype": "bf16"}},
    }[key]
    for stage in STAGES:
        extra = {
            "gradient_accumulation_steps": 33,
            "optimizer": {"type": "SGD", "params": {"lr": 33.0}},
            **narrow,
        }
        with line_at(stage, **extra) as engine:
            for step in range(33):
                engine.backward(engine(torch.full((1, 2), 1.0 if step == 0 else 2.0**-8)).sum())
                engine.step()
            found[stage] = weight_of(engine), engine.dtypes()["accumulation"]
    return found


@pytest.mark.parametrize("key", ["communication_data_type", "param_dtype"])
def test_gradients_are_added_in_fp32_whatever_is_sent(key):
    for found in ranks(2).run(_narrow_reduction, key):
        for stage in (0, 1) if key == "communication_data_type" else STAGES:
            assert found[stage] == ([-1.125, -1.125], "fp32"), stage


def test_eval_batch_keeps_what_the_user_put_in_evaluation_mode():
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5), nn.Linear(2, 1))
    with polyscale.initialize(model, config=config_of(0), loss_fn=lambda output, target: output.sum()) as engine:
        model[1].eval()
        engine.eval_batch(iter([(torch.ones(1, 2), torch.ones(1))]))
        assert [module.training for module in model] == [True, False, True]


class _Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(4, 4), nn.Linear(4, 4, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        return self.head(self.embed(x)).square().sum()


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", ["head", "embed.weight", "norm"])
def test_pins_by_plain_names_and_of_tied_weights(stage, name):
    config = config_of(stage, bf16={"enabled": True}, data_types={"keep_in_fp32_modules": [name]})
    try:
        with polyscale.initialize(_Tied(), config=config) as engine:
            engine.backward(engine(torch.arange(4)))
            assert engine.step()
            assert name != "norm" and stage == 0
    except polyscale.PolyscaleError as error:
        assert ("matches no parameter" if name == "norm" else "tied weight") in str(error)


def _gradients():
    found = {}
    for stage in STAGES:
        with line_at(stage, gradient_accumulation_steps=2) as engine:
            store, seen = engine.parameters_store, []
            assert store.get_full("weight", "gradient") is None
            for value in (1.0, 2.0):
                engine.backward(engine(torch.full((1, 2), value)).sum())
                seen.append(store.get_full("weight", "gradient").flatten().tolist())
                if value == 2.0:
                    store.set_full("weight", torch.full((1, 2), 8.0), "gradient")
                engine.step()
            found[stage] = seen, weight_of(engine), store.get_full("weight", "gradient")
    return found


def test_gradients_can_be_read_and_set_before_the_update():
    for found in ranks(2).run(_gradients):
        for stage in STAGES:
            seen, weight, after = found[stage]
            assert seen == [[2.0, 2.0], [6.0, 6.0]], "sums over ranks and micro-steps so far"
            assert weight == pytest.approx([-0.2, -0.2]), "the gradient that was set, averaged over 4"
            assert after is None


def test_a_callable_optimizer_over_the_parameters_it_knew_before():
    model = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(model.weight)
    known = list(model.parameters())
    config = {**config_of(2), "optimizer": None}
    del config["optimizer"]
    with polyscale.initialize(model, config=config, optimizer=lambda _: torch.optim.SGD(known, lr=0.1)) as engine:
        engine.backward(engine(torch.ones(1, 2)).sum())
        engine.step()
        assert weight_of(engine) == pytest.approx([-0.1, -0.1])


def test_a_model_in_16_bits_keeps_its_masters_when_the_engine_is_closed():
    model = nn.Linear(2, 1, bias=False)
    nn.init.ones_(model.weight)
    config = config_of(0, bf16={"enabled": True}, optimizer={"type": "SGD", "params": {"lr": 2.0**-12}})
    for _ in range(2):
        with polyscale.initialize(model, config=config) as engine:
            engine.backward(engine(torch.ones(1, 2)).sum())
            engine.step()
    assert model.weight.tolist() == [[1 - 2.0**-11] * 2]


def test_bf16_that_is_never_finite_ends():
    engine = line_at(0, bf16={"enabled": True})
    with pytest.raises(polyscale.PolyscaleError, match="20 updates in a row"):
        for _ in range(30):
            engine.backward(engine(torch.full((1, 2), float("inf"))).sum())
            engine.step()
    engine.close()


@pytest.mark.parametrize("stage", STAGES)
def test_evaluating_in_inference_mode_does_not_spoil_training(stage):
    torch.manual_seed(0)
    with polyscale.initialize(nn.Sequential(Block(), Block()), config=config_of(stage)) as engine:
        with torch.inference_mode():
            first = engine(torch.ones(1, 2))
        assert not first.requires_grad
        for _ in range(2):
            engine.backward(engine(torch.ones(1, 2)).sum())
            assert engine.step()


class _Teacher(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x):
        with torch.no_grad():
            for _ in range(2):
                for block in self.blocks:
                    target = block(x)
        for block in self.blocks:
            x = block(x)
        return (x - target).square().sum()


class _ViewBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x):
        return self.layer(x).view(-1, 2)


class _InPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(_ViewBlock() for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
            x += 1.0
        return x.square().sum()


def _trained_at_every_stage(model_class):
    found = {}
    for stage in STAGES:
        torch.manual_seed(0)
        with polyscale.initialize(model_class().double(), config=config_of(stage)) as engine:
            for _ in range(2):
                engine.backward(engine(torch.ones(1, 2, dtype=torch.float64)))
                engine.step()
            found[stage] = dict(engine.parameters_store.iter_full())
    return found


@pytest.mark.parametrize("model", [_Teacher, _InPlace], ids=["a teacher pass without gradient", "views in place"])
def test_forwards_that_fsdp_finds_hard_are_right_at_every_stage(model):
    for found in ranks(2).run(_trained_at_every_stage, model):
        for stage in STAGES:
            for name, value in found[0].items():
                torch.testing.assert_close(found[stage][name], value, rtol=0, atol=1e-12)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_compiled_model_has_the_names_of_the_model(stage, tmp_path):
    from safetensors.torch import load_file

    plain = nn.Sequential(Block(), Block())
    names = list(plain.state_dict())
    compiled = torch.compile(nn.Sequential(Block(), torch.compile(Block(), backend="eager")), backend="eager")
    with polyscale.initialize(compiled, config=config_of(stage)) as engine:
        assert [name for name, _ in engine.parameters_store.iter_full()] == names
        engine.backward(engine(torch.ones(1, 2)).sum())
        engine.step()
        engine.save(tmp_path)
        engine.export(tmp_path / "model.safetensors")
        trained = dict(engine.parameters_store.iter_full())
    assert set(load_file(tmp_path / "model.safetensors")) == set(names)
    with polyscale.initialize(plain, config=config_of(0)) as engine:
        engine.load(tmp_path)
        for name, value in engine.parameters_store.iter_full():
            assert torch.equal(value, trained[name])
