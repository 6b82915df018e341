"""Models, parameters and options that zero cannot train: each an error with what was given, why, and what to do."""

import copy
import pickle

import pytest
import torch
from torch import nn

import polyscale
from polyscale.testing import ranks

STAGES = (1, 2, 3)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return x + torch.tanh(self.layer(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(4, 1)

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()


def config(stage, options=None, optimizer=None):
    return {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": optimizer or {"type": "AdamW", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage},
        "backends": {
            "accelerator": "cpu",
            "communication": "gloo",
            "data_parallel": "zero",
            "options": {"zero": options or {}},
        },
    }


def engine_of(stage, model=None, **more):
    torch.manual_seed(0)
    return polyscale.initialize(Model() if model is None else model, config=config(stage, **more))


INPUTS = torch.tensor([[1, 2], [3, 4]])


def train(engine, steps=1):
    for _ in range(steps):
        engine.backward(engine(INPUTS))
        engine.step()


def weights(engine):
    return dict(engine.parameters_store.iter_full())


def error_of(call):
    try:
        call()
    except polyscale.PolyscaleError as error:
        assert error.given and error.why and error.fix, f"three parts: {error}"
        return str(error)
    except Exception as error:
        return f"another error: {type(error).__name__}: {error}"
    return "no error"


# Options.


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"unit_clases": ["Block"]}, ["unit_clases", "no such option", "'unit_classes'"]),
        ({"quantize": True}, ["quantize", "no such option", "share_host_memory"]),
        ({"unit_classes": "Block"}, ["'Block'", "list of class names"]),
        ({"unit_classes": [1]}, ["[1]", "list of class names"]),
        ({"unit_classes": {"Block": 1}}, ["list of class names"]),
        ({"unit_classes": []}, ["[]", "list of class names"]),
        ({"unit_classes": 3}, ["3", "list of class names"]),
        ({"unit_classes": ["Blok"]}, ["'Blok'", "no module of that class", "'Block'"]),
        ({"share_host_memory": "yes"}, ["'yes'", "true or false"]),
        ({"check_shared_memory": 1}, ["1", "true or false"]),
    ],
    ids=str,
)
def test_options_that_cannot_be_followed(options, words):
    text = error_of(lambda: engine_of(2, options=options))
    assert text.startswith("backends.options.zero"), text
    for word in words:
        assert word in text, text


def test_class_names_make_units():
    with engine_of(2, options={"unit_classes": ["Linear"]}) as engine:
        train(engine)


# Optimizers.


class Unknown(torch.optim.Optimizer):
    """Nobody knows whether it looks at whole tensors: it does."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad * parameter.norm() * group["lr"])


class Elementwise(Unknown):
    granularity = "element"

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad.sign() * group["lr"])


def optimizers(stage):
    found = {}
    model = Model()
    given = {
        "class": lambda: polyscale.initialize(Model(), config=config(stage), optimizer=Unknown),
        "instance": lambda: polyscale.initialize(model, config=config(stage), optimizer=Unknown(model.parameters())),
        "name": lambda: engine_of(stage, optimizer={"type": "Adafactor"}),
    }
    for how, make in given.items():
        found[how] = error_of(lambda make=make: train(make()))
    with polyscale.initialize(Model(), config=config(stage), optimizer=Elementwise) as engine:
        train(engine)
    return found


@pytest.mark.parametrize("stage", STAGES)
def test_an_optimizer_that_looks_at_whole_tensors(stage):
    for found in ranks(2).run(optimizers, stage):
        for how, name in {"class": "Unknown", "instance": "Unknown", "name": "Adafactor"}.items():
            text = found[how]
            assert name in text and "flat shards" in text and "whole" in text, (how, text)
            assert "AdamW" in text and "granularity = 'element'" in text, text


# Parameters that change under the engine.


def replace(model):
    model.blocks[1].layer.weight = nn.Parameter(torch.zeros(4, 4))


def replace_in_root(model):
    model.head.bias = nn.Parameter(torch.zeros(1))


def remove(model):
    model.blocks[1].layer.bias = None


def replace_module(model):
    model.blocks[1] = Block()


def add(model):
    model.blocks[1].extra = nn.Parameter(torch.zeros(3))


def add_module(model):
    model.adapter = nn.Linear(4, 4)


def add_nested(model):
    model.blocks[1].layer.adapter = nn.Sequential(nn.Linear(2, 2))


def fill_none(model):
    model.blocks[2].layer.nothing = nn.Parameter(torch.zeros(2))


def new_data(model):
    model.head.weight.data = torch.zeros(1, 4)


def new_data_of_another_shape(model):
    model.head.weight.data = torch.zeros(1, 7)


def resize(model):
    model.head.weight.requires_grad_(False).resize_(1, 2)


CHANGES = {
    replace: ["'blocks.1.layer.weight'", "replaced"],
    replace_in_root: ["'head.bias'", "replaced"],
    remove: ["'blocks.1.layer.bias'", "removed"],
    replace_module: ["'blocks.1.layer.weight'", "added"],
    add: ["'blocks.1.extra'", "added"],
    add_module: ["'adapter.weight'", "added"],
    add_nested: ["'blocks.1.layer.adapter.0.weight'", "added"],
    fill_none: ["'blocks.2.layer.nothing'", "added"],
    new_data: ["'head.weight'"],
    new_data_of_another_shape: ["'head.weight'"],
    resize: ["'head.weight'"],
}


def changes(stage):
    found = {}
    for change in CHANGES:
        model = Model()
        model.blocks[2].layer.register_parameter("nothing", None)
        with engine_of(stage, model) as engine:
            train(engine)

            def attempt(engine=engine, change=change):
                with torch.no_grad():
                    change(engine.module)
                engine(INPUTS)

            found[change.__name__] = error_of(attempt)
    return found


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.long), 2, pytest.param(3, marks=pytest.mark.long)])
def test_a_parameter_that_is_replaced_removed_or_added_after_initialize(stage):
    for found in ranks(2).run(changes, stage):
        for change, words in CHANGES.items():
            for word in words:
                assert word in found[change.__name__], (change.__name__, found[change.__name__])


def harmless_changes(stage):
    with engine_of(stage) as engine:
        train(engine)
        engine.module.note = nn.Identity()  # a module without parameters
        engine.module.blocks[0].register_buffer("count", torch.zeros(1))
        engine.module.blocks[1].layer.weight.requires_grad_(False)
        train(engine)
        engine.module.blocks[1].layer.weight.requires_grad_(True)
        del engine.module.note
        train(engine)
        loss = torch.func.functional_call(engine.module, {"head.bias": torch.zeros(1)}, (INPUTS,))
        train(engine)
        return bool(torch.isfinite(loss))


@pytest.mark.parametrize("stage", STAGES)
def test_changes_that_do_no_harm(stage):
    assert ranks(2).run(harmless_changes, stage) == [True, True]


# Uses outside a unit's forward.


def uses_outside():
    mine = Model()
    kept = list(mine.parameters())  # as for an average of weights that a user keeps
    with engine_of(3, mine) as engine:
        train(engine)
        model = engine.module
        weight, embedding = model.blocks[1].layer.weight, model.embed.weight
        tries = {
            "functional": lambda: nn.functional.embedding(INPUTS, embedding),
            "product": lambda: torch.ones(2, 4) @ weight,
            "data": lambda: weight.data.sum(),
            "detach": lambda: weight.detach(),
            "index": lambda: weight[0],
            "item": lambda: weight.sum().item(),
            "numpy": lambda: weight.numpy(),
            "list": lambda: weight.tolist(),
            "print of values": lambda: weight.cpu(),
            "copy in": lambda: weight.copy_(torch.zeros(4, 4)),
            "equal": lambda: torch.equal(weight, weight),
            "kept norm": lambda: kept[1].norm(),
            "norms": lambda: torch._foreach_norm(kept),
            "iteration": lambda: list(weight),
            "pointer": lambda: weight.data_ptr(),
            "storage": lambda: weight.untyped_storage(),
            "module": lambda: model.blocks[1].layer(torch.ones(2, 4)),
            "deepcopy": lambda: copy.deepcopy(model),
            "deepcopy of one": lambda: copy.deepcopy(weight),
            "pickle": lambda: pickle.dumps(weight),
            "state_dict": lambda: model.state_dict(),
            "to": lambda: model.to(torch.float64),
            "half": lambda: model.half(),
            "vector": lambda: nn.utils.parameters_to_vector(model.parameters()),
            "share_memory": lambda: model.share_memory(),
        }
        found = {name: error_of(call) for name, call in tries.items()}
        answers = repr(weight), tuple(weight.shape), weight.dtype, weight.numel(), str(weight.device), weight.grad
        train(engine)
        return found, answers


def test_a_parameter_is_used_outside_the_forward_of_its_unit():
    for found, answers in ranks(2).run(uses_outside):
        for name, text in found.items():
            assert "outside the forward of its unit" in text, (name, text)
            assert "'embed.weight'" in text or "'blocks.1.layer" in text or "'blocks.0.layer" in text, (name, text)
            assert "gathered" in text
        assert "blocks.1.layer.weight" in answers[0]
        assert answers[1:] == ((4, 4), torch.float32, 16, "cpu", None)


# Kinds of parameters and gradients.


class Odd(nn.Module):
    """Has a parameter of an unusual kind in a block and in the root."""

    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.kind = kind
        if kind == "sparse":
            self.table = nn.Embedding(6, 4, sparse=True)
        if kind == "complex":
            self.wave = nn.Parameter(torch.randn(4, dtype=torch.complex64))
        if kind == "integer":
            self.shifts = nn.Parameter(torch.arange(4), requires_grad=False)
        if kind == "bool":
            self.mask = nn.Parameter(torch.tensor([True, False, True, True]), requires_grad=False)

    def forward(self, x):
        if self.kind == "sparse":
            x = x + self.table(torch.tensor([1, 3]))
        if self.kind == "complex":
            x = (x * self.wave).abs()
        if self.kind == "integer":
            x = x + self.shifts
        if self.kind == "bool":
            x = x * self.mask
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def odd(kind, stage):
    def attempt():
        with polyscale.initialize(
            Odd(kind), config=config(stage, optimizer={"type": "SGD", "params": {"lr": 0.1}})
        ) as e:
            for _ in range(2):
                e.backward(e(torch.ones(2, 4)))
                e.step()
            found.update(weights(e))

    found = {}
    text = error_of(attempt)
    return text, found


def of_one_process(kind):
    model = Odd(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.ones(2, 4)).backward()
        for parameter in model.parameters():
            if parameter.grad is not None and parameter.grad.is_sparse:
                parameter.grad = parameter.grad.to_dense()
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.named_parameters())


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("kind", ["sparse", "integer", "bool"])
def test_sparse_gradients_and_parameters_that_are_no_floats_train(kind, stage):
    expected = of_one_process(kind)
    for text, found in ranks(2).run(odd, kind, stage):
        assert text == "no error", text
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value.detach())


@pytest.mark.parametrize("stage", STAGES)
def test_complex_parameters_are_refused(stage):
    for text, _ in ranks(2).run(odd, "complex", stage):
        assert "'wave'" in text and "complex64" in text, text
        assert "view_as_real" in text, text


def models_elsewhere(stage):
    found = []
    for device in ("meta", "cpu"):
        model = Model()
        model.blocks[0].to(device)
        found.append(error_of(lambda model=model: train(polyscale.initialize(model, config=config(stage)))))
    return found


@pytest.mark.parametrize("stage", [1, 3])
def test_a_model_that_is_partly_on_the_meta_device(stage):
    for mixed, plain in ranks(2).run(models_elsewhere, stage):
        assert plain == "no error"
        assert mixed == "no error" or "meta" in mixed, mixed


def used_twice(stage):
    with engine_of(stage) as engine:
        train(engine)
        model = engine.module
        return error_of(lambda: polyscale.initialize(model, config=config(stage)))


def again_after_close(stage):
    engine = engine_of(stage)
    train(engine)
    model = engine.module
    engine.close()
    return error_of(lambda: polyscale.initialize(model, config=config(stage)))


def copies(stage):
    """A copy of a model that is not freed, as for an average of weights, and its numbers after more training."""
    with engine_of(stage) as engine:
        train(engine)
        twin = copy.deepcopy(engine.module)
        before = engine(INPUTS).item()
        train(engine)
        assert engine(INPUTS).item() != before
        twin(INPUTS).backward()
        assert twin.head.weight.grad is not None
        return twin(INPUTS).item() == before


@pytest.mark.parametrize("stage", [1, 2])
def test_a_copy_of_the_model_is_a_model_of_its_own(stage):
    assert ranks(2).run(copies, stage) == [True, True]


def test_a_model_belongs_to_one_engine():
    for stage in STAGES:
        for text in ranks(2).run(used_twice, stage):
            assert "another engine" in text, text
    for text in ranks(2).run(again_after_close, 3):
        assert "already sharded" in text, text
