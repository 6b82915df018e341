"""Calls in an order or on an object that would train wrongly: each is an error that says so, and training can go on."""

import pytest
import torch
from torch import nn

import polyscale
from polyscale.testing import ranks

STAGES = (1, 2, 3)
EVERY_PLUGIN = [("ddp", 0), ("zero", 1), ("zero", 3), ("fsdp2", 3)]
EVERY_PLUGIN += [pytest.param(*case, marks=pytest.mark.long) for case in (("zero", 2), ("fsdp2", 1), ("fsdp2", 2))]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return x + torch.tanh(self.layer(x))


class Model(nn.Module):
    def __init__(self, wrap=False):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(4, 1)
        self.wrap = wrap

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        loss = self.head(x).square().mean()
        return Opaque(loss) if self.wrap else loss


class Opaque:
    __slots__ = ("hidden",)

    def __init__(self, loss):
        self.hidden = [lambda: loss]  # nobody looks into a function

    @property
    def loss(self):
        return self.hidden[0]()


def engine_of(plugin, stage, model=None, **more):
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage},
        "backends": {"accelerator": "cpu", "communication": "gloo", "data_parallel": plugin},
        **more,
    }
    return polyscale.initialize(Model() if model is None else model, config=config)


def inputs(step=0):
    return torch.randn(2, 4, generator=torch.Generator().manual_seed(step))


def error_of(call):
    try:
        call()
    except polyscale.PolyscaleError as error:
        assert error.given and error.why and error.fix, f"three parts: {error}"
        return str(error)
    except BaseException as error:
        return f"another error: {type(error).__name__}: {error}"
    return "no error"


def weights(engine):
    return dict(engine.parameters_store.iter_full())


def same(first, second):
    return all(torch.equal(first[name], second[name]) for name in first)


def train(engine, steps):
    for step in steps:
        engine.backward(engine(inputs(step)))
        engine.step()


def expected_after(plugin, stage, steps):
    with engine_of(plugin, stage) as engine:
        train(engine, steps)
        return weights(engine)


def a_loss_of_another_engine(plugin, stage):
    with engine_of(plugin, stage) as first, engine_of(plugin, stage) as second:
        train(first, [0])
        train(second, [0])
        before = weights(first), weights(second)
        texts = [error_of(lambda: first.backward(second(inputs(1))))]
        texts.append(error_of(lambda: first.backward(first(inputs(1)) + second(inputs(1)))))
        texts.append(error_of(first.step))
        unchanged = same(before[0], weights(first)) and same(before[1], weights(second))
        train(first, [1, 2])
        train(second, [1, 2])
        after = weights(first), weights(second)
    expected = expected_after(plugin, stage, range(3))
    return texts, unchanged, same(after[0], expected), same(after[1], expected)


@pytest.mark.parametrize(("plugin", "stage"), EVERY_PLUGIN)
def test_a_loss_of_another_engine(plugin, stage):
    for texts, unchanged, first, second in ranks(2).run(a_loss_of_another_engine, plugin, stage):
        for text in texts[:2]:
            assert "outside engine.backward() of the engine that trains it" in text, text
            assert "'blocks." in text or "'head." in text, text
        assert "after an exception in backward" in texts[2]
        assert unchanged
        assert first and second, "training goes on as if nothing had been tried"


def a_backward_of_torch(plugin, stage):
    with engine_of(plugin, stage) as engine:
        train(engine, [0])
        before = weights(engine)
        texts = [error_of(lambda: engine(inputs(1)).backward())]
        unchanged = same(before, weights(engine))
        train(engine, [1, 2])
        after = weights(engine)
    return texts, unchanged, same(after, expected_after(plugin, stage, range(3)))


@pytest.mark.parametrize(("plugin", "stage"), EVERY_PLUGIN)
def test_a_backward_of_torch_on_the_loss(plugin, stage):
    for texts, unchanged, goes_on in ranks(2).run(a_backward_of_torch, plugin, stage):
        assert "outside engine.backward() of the engine that trains it" in texts[0], texts
        assert unchanged and goes_on


def a_step_between(plugin, stage):
    found = {}
    for wrap in (False, True):
        take = (lambda output: output.loss) if wrap else (lambda output: output)
        with engine_of(plugin, stage, Model(wrap)) as engine:
            old = take(engine(inputs(1)))
            engine.backward(take(engine(inputs(0))))
            engine.step()
            found["second forward", wrap] = error_of(lambda old=old: engine.backward(old))
            loss = take(engine(inputs(2)))
            engine.parameters_store.set_full("head.weight", torch.ones(1, 4))
            found["set_full", wrap] = error_of(lambda loss=loss: engine.backward(loss))
            engine.backward(take(engine(inputs(3))))
            assert engine.step()
    return found


@pytest.mark.parametrize(("plugin", "stage"), [("zero", 1), ("zero", 2), ("zero", 3)])
def test_a_step_between_a_forward_and_its_backward(plugin, stage):
    for found in ranks(2).run(a_step_between, plugin, stage):
        for (_, wrapped), text in found.items():
            said = (
                "written into after its forward" if wrapped else "forward ran before the parameters were last changed"
            )
            assert said in text, found


class Raises(Model):
    """Raises where it is told to."""

    def forward(self, x, where=""):
        x = self.blocks[1](self.blocks[0](x))
        if where == "forward":
            raise KeyError("forward")
        if where == "backward":
            x.register_hook(self.fail)
        return self.head(self.blocks[2](x)).square().mean()

    def fail(self, gradient):
        raise KeyError("backward")


def exceptions_on_all_ranks(stage):
    with engine_of("zero", stage, Raises(), gradient_accumulation_steps=2) as engine:
        for step in range(4):
            if step == 3:  # in the middle of an accumulation: it is dropped
                for where in ("forward", "backward", "forward"):
                    text = error_of(lambda where=where: engine.backward(engine(inputs(9), where)))
                    assert "KeyError" in text, text
                train(engine, [2])
            train(engine, [step])
        found = weights(engine)
    with engine_of("zero", stage, Raises(), gradient_accumulation_steps=2) as engine:
        train(engine, range(4))
        return same(found, weights(engine))


@pytest.mark.parametrize("stage", STAGES)
def test_an_exception_on_all_ranks_drops_the_accumulation_and_no_more(stage):
    assert ranks(2).run(exceptions_on_all_ranks, stage) == [True, True]


def writing_to_gathered(stage):
    with engine_of("zero", stage) as engine:
        store, found = engine.parameters_store, []
        before = weights(engine)
        for write in (
            lambda full: full["head.weight"].zero_(),
            lambda full: engine.module.head.weight.data.fill_(3.0),
            lambda full: engine.module.blocks[1].layer.weight.data.fill_(3.0),
        ):

            def attempt(write=write):
                with store.gathered(["head.weight", "blocks.1.layer.weight"]) as full:
                    write(full)

            found.append(error_of(attempt))
        assert same(before, weights(engine))
        with store.gathered(["blocks.1.layer.weight"], modify=True):
            engine.module.blocks[1].layer.weight.data.fill_(torch.distributed.get_rank() + 3.0)
        assert bool((store.get_full("blocks.1.layer.weight") == 3.0).all())
        train(engine, [0])
        return found


@pytest.mark.parametrize("stage", STAGES)
def test_writing_to_a_gathered_parameter_read_only(stage):
    for found in ranks(2).run(writing_to_gathered, stage):
        for text, name in zip(found, ("head.weight", "head.weight", "blocks.1.layer.weight"), strict=True):
            assert name in text and "modify=True" in text
