"""What a user does wrong with an engine: each is an error with what was given, why, and what to do."""

import pytest
import torch
from torch import nn

import polyscale
from polyscale.errors import PolyscaleError

CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
}
FSDP2 = {"backends": {"data_parallel": "fsdp2"}}


@pytest.fixture(params=[0, 2])
def engine(request):
    torch.manual_seed(0)
    engine = polyscale.initialize(nn.Linear(2, 1), config={**CONFIG, "zero_optimization": {"stage": request.param}})
    yield engine
    engine._accumulation.reset()
    engine.close()


def _three_parts(error, *words):
    assert error.value.given
    assert error.value.fix
    for word in words:
        assert word in str(error.value)


def test_step_without_backward(engine):
    with pytest.raises(PolyscaleError) as error:
        engine.step()
    _three_parts(error, "without a backward")


def test_backward_of_what_is_no_loss(engine):
    with pytest.raises(PolyscaleError) as error:
        engine.backward(engine(torch.ones(3, 2)))
    _three_parts(error, "(3, 1)", "mean")
    with pytest.raises(PolyscaleError) as error:
        engine.backward(torch.tensor(1.0))
    _three_parts(error, "without a graph")


def test_mixing_weighted_and_unweighted_backwards(engine):
    engine.backward(engine(torch.ones(1, 2)).sum(), weight=1)
    with pytest.raises(PolyscaleError) as error:
        engine.backward(engine(torch.ones(1, 2)).sum())
    _three_parts(error, "weight")
    with pytest.raises(PolyscaleError):
        engine.backward(engine(torch.ones(1, 2)).sum(), weight=float("nan"))


def test_save_and_close_with_an_open_accumulation(engine, tmp_path):
    engine.backward(engine(torch.ones(1, 2)).sum())
    engine.step()
    with pytest.raises(PolyscaleError) as error:
        engine.save(tmp_path)
    _three_parts(error, "1 of 2", "flush")
    with pytest.raises(PolyscaleError) as error:
        engine.close()
    _three_parts(error, "1 of 2", "flush")
    assert not list(tmp_path.iterdir())


def test_an_exception_on_its_way_turns_the_open_accumulation_into_a_warning(caplog):
    with pytest.raises(KeyError), polyscale.initialize(nn.Linear(2, 1), config=CONFIG) as engine:
        engine.backward(engine(torch.ones(1, 2)).sum())
        raise KeyError("the user's own")
    assert "1 of 2" in caplog.text


def test_a_closed_engine_says_so(engine):
    engine.close()
    with pytest.raises(PolyscaleError) as error:
        engine(torch.ones(1, 2))
    _three_parts(error, "closed")
    engine.close()


def test_the_store_of_a_closed_engine_says_so(engine):
    engine.close()
    with pytest.raises(PolyscaleError) as error:
        engine.parameters_store.get_full("weight")
    _three_parts(error, "parameters_store.get_full of a closed engine")


@pytest.mark.parametrize("call", ["save", "load", "export"])
def test_paths_that_are_none(engine, call):
    with pytest.raises(PolyscaleError) as error:
        getattr(engine, call)(None)
    _three_parts(error, f"{call}(None)", "NoneType is no path")


def test_a_value_that_is_no_tensor(engine):
    with pytest.raises(PolyscaleError) as error:
        engine.parameters_store.set_full("weight", 3)
    _three_parts(error, "'weight'", "3", "no tensor")


def test_data_that_holds_no_samples():
    with pytest.raises(PolyscaleError) as error:
        polyscale.initialize(nn.Linear(2, 1), config=CONFIG, data=5)
    _three_parts(error, "data = 5", "neither a dataset nor iterable")


def test_of_two_optimizers_the_one_that_is_not_used_is_named(caplog):
    with polyscale.initialize(nn.Linear(2, 1), config=CONFIG, optimizer=lambda ps: torch.optim.SGD(ps, lr=0.5)) as one:
        assert type(one.optimizer).__name__ == "SGD"
    assert "that of the configuration (AdamW) is not" in caplog.text


def test_writing_to_a_gathered_parameter_without_modify(engine):
    store = engine.parameters_store
    before = store.get_full("weight")
    for write in (
        lambda full: full.zero_(),
        lambda full: engine.module.weight.data.fill_(3.0),
    ):
        with pytest.raises(PolyscaleError) as error, store.gathered(["weight"]) as whole:
            write(whole["weight"])
        _three_parts(error, "weight", "modify=True")
        assert torch.equal(store.get_full("weight"), before)
    with store.gathered([engine.module.weight], modify=True):
        engine.module.weight.data.fill_(3.0)
    assert torch.equal(store.get_full("weight"), torch.full((1, 2), 3.0))
    with pytest.raises(PolyscaleError) as error:
        store.get_full("wieght")
    _three_parts(error, "'weight'")


def test_optimizers_that_cannot_be_taken():
    model = nn.Linear(2, 1)
    stranger = torch.optim.AdamW(nn.Linear(2, 1).parameters())
    with pytest.raises(PolyscaleError) as error:
        polyscale.initialize(model, config={"train_batch_size": 1}, optimizer=stranger)
    _three_parts(error, "not the model's")
    used = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    used.step()
    with pytest.raises(PolyscaleError) as error:
        polyscale.initialize(model, config={"train_batch_size": 1}, optimizer=used)
    _three_parts(error, "taken steps")
    with pytest.raises(PolyscaleError) as error:
        polyscale.initialize(model, config={**CONFIG, "optimizer": {"type": "AdamWW"}})
    _three_parts(error, "'adamw'", "Installed")


def test_an_optimizer_instance_is_kept_and_trains_what_the_engine_trains():
    for stage in (0, 1, 2, 3):
        torch.manual_seed(0)
        model = nn.Linear(2, 1)
        given = torch.optim.SGD(model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(given, 1, gamma=0.5)
        config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage}}
        with polyscale.initialize(model, config=config, optimizer=given, lr_scheduler=schedule) as engine:
            assert engine.optimizer is given
            before = engine.parameters_store.get_full("weight")
            engine.backward(engine(torch.ones(1, 2)).sum())
            engine.step()
            after = engine.parameters_store.get_full("weight")
            torch.testing.assert_close(after, before - 0.1)
            assert engine.learning_rates() == (0.05,)


class _Scaled(torch.optim.Optimizer):
    """An optimizer class that polyscale does not know: it steps by the sign, scaled by the norm of the parameter."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad.sign() * parameter.norm() * group["lr"])


def test_a_callable_optimizer_and_schedule():
    with polyscale.initialize(
        nn.Linear(2, 1),
        config={"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}, **FSDP2},
        optimizer=lambda parameters: _Scaled(parameters, lr=0.01),
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5),
    ) as engine:
        before = engine.parameters_store.get_full("weight")
        engine.backward(engine(torch.ones(1, 2)).sum())
        assert engine.step()
        assert engine.learning_rates() == (0.005,)
        torch.testing.assert_close(engine.parameters_store.get_full("weight"), before - 0.01 * before.norm())


def test_an_optimizer_that_cannot_update_shards():
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "Adafactor"}}
    with polyscale.initialize(nn.Linear(2, 1), config=config) as engine:
        engine.backward(engine(torch.ones(1, 2)).sum())
        assert engine.step()
    engine = polyscale.initialize(nn.Linear(2, 1), config={**config, **FSDP2, "zero_optimization": {"stage": 2}})
    engine.backward(engine(torch.ones(1, 2)).sum())
    with pytest.raises(PolyscaleError) as error:
        engine.step()
    _three_parts(error, "Adafactor", "stage 0")
    engine._accumulation.reset()
    engine.close()


class _Bypass(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.GELU()) for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = block[0](x)  # not block(x): the unit is not called
        return x.sum()


def test_a_unit_that_is_not_called_as_a_whole_is_explained():
    config = {**CONFIG, **FSDP2, "zero_optimization": {"stage": 3}}
    engine = polyscale.initialize(_Bypass(), config=config)
    with pytest.raises(PolyscaleError) as error:
        engine(torch.ones(1, 2))
    _three_parts(error, "outside the forward of its unit", "unit_classes")
    engine.close()


def test_a_model_belongs_to_one_engine():
    for stage in (0, 2):
        model = nn.Linear(2, 1)
        config = {**CONFIG, **(FSDP2 if stage else {}), "zero_optimization": {"stage": stage}}
        engine = polyscale.initialize(model, config=config)
        with pytest.raises(PolyscaleError) as error:
            polyscale.initialize(model, config=config)
        _three_parts(error, "another engine")
        engine.close()
    with pytest.raises(PolyscaleError) as error:
        polyscale.initialize(model, config=config)
    _three_parts(error, "already sharded")


class _Sometimes(nn.Module):
    """Raises in forward or in backward when it is told to."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.Tanh()) for _ in range(2))

    def forward(self, x, fail=""):
        for index, block in enumerate(self.blocks):
            x = block(x)
            if fail == "forward" and index == 0:
                raise KeyError("forward")
        if fail == "backward":
            x.register_hook(self._fail)
        return x.square().sum()

    def _fail(self, gradient):
        raise KeyError("backward")


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_training_goes_on_after_an_exception_that_was_caught(stage, caplog):
    def train(failures):
        torch.manual_seed(0)
        config = {**CONFIG, "zero_optimization": {"stage": stage}}
        with polyscale.initialize(_Sometimes(), config=config) as engine:
            for step in range(4):
                if step == 2:
                    for fail in failures:
                        with pytest.raises(KeyError):
                            engine.backward(engine(torch.ones(1, 2), fail))
                engine.backward(engine(torch.full((1, 2), 1.0 + step)))
                engine.step()
            return dict(engine.parameters_store.iter_full())

    expected, found = train([]), train(["forward", "backward", "forward"])
    for name, value in expected.items():
        assert torch.equal(found[name], value)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_what_is_written_between_two_forwards_is_used_by_the_second(stage, tmp_path):
    torch.manual_seed(0)
    config = {**CONFIG, "zero_optimization": {"stage": stage}}
    with polyscale.initialize(nn.Linear(2, 1), config=config) as engine, torch.no_grad():
        inputs = torch.ones(1, 2)
        engine.save(tmp_path)
        before = engine(inputs)
        engine.parameters_store.set_full("weight", torch.full((1, 2), 5.0))
        engine.parameters_store.set_full("bias", torch.zeros(1))
        assert engine(inputs).item() == 10.0
        with engine.parameters_store.gathered(["weight"], modify=True) as whole:
            whole["weight"].fill_(7.0)
        assert engine(inputs).item() == 14.0
        engine.load(tmp_path)
        assert torch.equal(engine(inputs), before)
