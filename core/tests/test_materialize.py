"""Materializer: three starts behind one call; the meta start is self-consistent and has the eager statistics."""

import weakref

import numpy
import pytest
import torch
import transformers
from torch import nn

from polyscale import PolyscaleError, partitioned_init
from polyscale.parameters.deferred import replay
from polyscale.parameters.materialize import materializer

torch.set_num_threads(1)
SMALL = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 64,
}
MODELS = {
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            n_layer=8, n_embd=32, n_head=2, vocab_size=128, n_positions=64, bos_token_id=0, eos_token_id=1
        )
    ),
    "llama": lambda: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(num_key_value_heads=1, pad_token_id=0, **SMALL)
    ),
    "bert": lambda: transformers.BertForMaskedLM(transformers.BertConfig(**SMALL)),
    "mixtral": lambda: transformers.MixtralForCausalLM(
        transformers.MixtralConfig(num_local_experts=2, num_key_value_heads=1, **SMALL)
    ),
    "transformer": lambda: nn.Transformer(32, 2, 1, 1, 64, batch_first=True),
    "recurrent": lambda: nn.LSTM(32, 32, 2),
    "convolution": lambda: nn.Sequential(nn.Conv2d(16, 32, 3), nn.BatchNorm2d(2048), nn.Embedding(64, 32, 5)),
}


def tensors_of(module):
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    return dict(named)


def on_meta(make):
    with torch.device("meta"):
        return make()


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@pytest.mark.parametrize("name", MODELS)
def test_a_meta_model_gets_the_statistics_of_an_eager_one(name):
    torch.manual_seed(0)
    eager = MODELS[name]().requires_grad_(False)
    start = materializer(on_meta(MODELS[name]), seed=1)
    assert start.kind == "meta"
    for fqn, expected in tensors_of(eager).items():
        value = start.value(fqn)
        assert value.shape == expected.shape and value.dtype == expected.dtype and not value.is_meta, fqn
        if not isinstance(expected, nn.Parameter) or expected.numel() < 200:
            constant = expected.numel() < 2 or float(expected.double().std()) == 0
            if constant:
                assert torch.equal(value, expected), fqn
            continue
        spread, wanted = float(value.double().std()), float(expected.double().std())
        assert abs(spread - wanted) <= 0.15 * wanted, fqn
        assert abs(float(value.double().mean() - expected.double().mean())) <= 0.3 * wanted + 1e-12, fqn
        zero_rows = (expected.flatten(1) == 0).all(1) if expected.dim() > 1 else torch.zeros(1, dtype=torch.bool)
        if zero_rows.any():  # padding_idx
            assert torch.equal((value.flatten(1) == 0).all(1), zero_rows), fqn


def test_the_residual_scale_of_gpt2_reaches_the_projections():
    start = materializer(on_meta(MODELS["gpt2"]), seed=1)
    for block in range(8):
        for part in ("attn", "mlp"):
            spread = float(start.value(f"transformer.h.{block}.{part}.c_proj.weight").std())
            assert spread == pytest.approx(0.02 / (2 * 8) ** 0.5, rel=0.15)
    assert float(start.value("transformer.h.0.mlp.c_fc.weight").std()) == pytest.approx(0.02, rel=0.1)


def test_meta_values_depend_on_seed_and_name_alone():
    make = MODELS["gpt2"]
    first = materializer(on_meta(make), seed=1)
    expected = {fqn: first.value(fqn) for fqn in tensors_of(on_meta(make))}
    torch.manual_seed(99)  # another global state, another order, some of them twice
    numpy.random.seed(99)
    second = materializer(on_meta(make), seed=1)
    state = torch.get_rng_state()
    for fqn in reversed(expected):
        assert torch.equal(second.value(fqn), expected[fqn])
        assert torch.equal(second.value(fqn), expected[fqn])
    assert torch.equal(torch.get_rng_state(), state)
    other = materializer(on_meta(make), seed=2)
    name = "transformer.h.0.mlp.c_fc.weight"
    assert not torch.equal(other.value(name), expected[name])
    assert not torch.equal(expected["transformer.h.1.mlp.c_fc.weight"], expected[name])
    assert torch.equal(expected["lm_head.weight"], expected["transformer.wte.weight"])


def test_a_tied_tensor_is_set_at_its_first_place():
    def make():
        model = nn.Sequential(nn.Embedding(40, 40, padding_idx=3), nn.Linear(40, 40, bias=False))
        model[1].weight = model[0].weight
        return model

    start = materializer(on_meta(make), seed=0)
    assert torch.equal(start.value("0.weight"), start.value("1.weight"))
    assert torch.equal((start.value("1.weight") == 0).all(1).nonzero().flatten(), torch.tensor([3]))

    def late():
        model = nn.Sequential(Bare(), nn.BatchNorm1d(8))
        model[0].scale = model[1].weight
        return model

    assert torch.equal(materializer(on_meta(late), seed=0).value("0.scale"), torch.ones(8))


def test_a_part_has_the_values_of_the_whole():
    whole = materializer(on_meta(lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))), seed=3)
    part = materializer(on_meta(lambda: nn.Linear(8, 8)), seed=3, prefix="1")
    assert torch.equal(part.value("1.weight"), whole.value("1.weight"))
    assert torch.equal(part.value("1.bias"), whole.value("1.bias"))


def test_initialisers_that_draw_elsewhere_are_repeatable():
    class Drawn(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Parameter(torch.empty(50))
            self.b = nn.Parameter(torch.empty(50))
            self.c = nn.Parameter(torch.empty(50, 50))

        def reset_parameters(self):
            with torch.no_grad():
                self.a.copy_(torch.from_numpy(numpy.random.randn(50)))
                self.b.copy_(torch.randperm(50)).mul_(torch.rand(50))
                nn.init.trunc_normal_(self.c, a=-1.0, b=1.0)

    outcomes = []
    for seed in (5, 6):
        torch.manual_seed(seed)
        numpy.random.seed(seed)
        start = materializer(on_meta(Drawn), seed=0)
        outcomes.append([start.value(name) for name in "abc"])
        assert numpy.random.get_state()[1][0] == seed
    assert all(torch.equal(x, y) for x, y in zip(*outcomes, strict=True))
    assert float(outcomes[0][2].abs().max()) <= 1.0


def test_real_tensors_of_a_meta_model_stay_and_are_not_written():
    model = on_meta(lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)))
    model[0].weight = nn.Parameter(torch.full((8, 8), 2.0))
    model[1].running_mean = torch.full((8,), 3.0)
    start = materializer(model, seed=0)
    assert start.kind == "meta"
    assert start.value("0.weight").data_ptr() == model[0].weight.data_ptr()
    assert torch.equal(model[0].weight, torch.full((8, 8), 2.0))
    assert torch.equal(model[1].running_mean, torch.full((8,), 3.0))
    assert torch.equal(start.value("1.running_var"), torch.ones(8))
    assert model[0].bias.is_meta


def test_real_and_deferred_starts():
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64))
    real = materializer(model, seed=0)
    assert real.kind == "real"
    assert real.value("0.weight").data_ptr() == model[0].weight.data_ptr() and not real.value("0.weight").requires_grad
    assert [name for name, _ in real.buffers()] == ["1.running_mean", "1.running_var", "1.num_batches_tracked"]
    freed = weakref.ref(model[0].weight)
    model[0].weight = None
    assert freed() is None  # the source of starting values keeps no weight alive
    with partitioned_init():
        model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64))
    deferred = materializer(model, seed=0)
    assert deferred.kind == "deferred"
    assert torch.equal(deferred.value("0.weight"), replay(model[0].weight))
    assert torch.equal(deferred.value("0.bias"), model[0].bias)


class Bare(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))


class Half(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.empty(4, 8))

    def reset_parameters(self):
        nn.init.zeros_(self.scale[:2])


class Table(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.arange(8))


class Failing(Bare):
    def reset_parameters(self):
        raise ValueError("no such file")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (Bare, ["parameter 1.scale", "no initialiser", "partitioned_init"]),
        (Table, ["buffer 1.table", "no initialiser", "partitioned_init"]),
        (Failing, ["parameter 1.scale", "no such file", "partitioned_init"]),
    ],
)
def test_what_no_initialiser_sets_is_named(make, words):
    with pytest.raises(PolyscaleError) as caught:
        materializer(on_meta(lambda: nn.Sequential(nn.Linear(4, 4), make())), seed=0)
    assert all(word in str(caught.value) for word in words)
    assert caught.value.given and caught.value.why and caught.value.fix


def test_what_an_initialiser_sets_in_part_is_named():
    start = materializer(on_meta(lambda: nn.Sequential(Half())), seed=0)
    with pytest.raises(PolyscaleError, match=r"0\.scale.*part of it"):
        start.value("0.scale")


def test_a_change_after_the_context_is_an_error():
    with partitioned_init():
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    model[0].to(torch.bfloat16)
    with pytest.raises(PolyscaleError, match=r"0\.weight.*inside"):
        materializer(model, seed=0)


def recorded():
    with partitioned_init():
        return nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))


@torch.no_grad()
def written(tensor):
    tensor.copy_(torch.ones(64, 64))


@pytest.mark.filterwarnings("ignore:.*meta parameter")
@pytest.mark.parametrize(
    "edit",
    [
        lambda model: model[1].load_state_dict(nn.Linear(64, 64).state_dict()),
        lambda model: model[1].apply(lambda module: nn.init.ones_(module.weight)),
        lambda model: nn.init.kaiming_uniform_(model[1].weight),
        lambda model: written(model[1].weight),
        lambda model: written(model[1].weight.t()),
        lambda model: model[1].weight.detach().zero_(),
        lambda model: model.state_dict()["1.weight"].zero_(),
    ],
)
def test_an_edit_after_the_context_is_an_error(edit):
    model = recorded()
    edit(model)
    with pytest.raises(PolyscaleError, match=r"1\.weight was edited after the block") as caught:
        materializer(model, seed=0)
    assert "inside" in caught.value.fix and "assign=True" in caught.value.fix and "set_full" in caught.value.fix


def test_what_leaves_the_weights_alone_after_the_context_is_allowed():
    model = recorded()
    expected = [replay(model[0].weight), replay(model[1].weight)]
    model.requires_grad_(False).requires_grad_(True).float().eval()
    model[1].bias.data.fill_(2.0)  # real, so nothing is lost
    start = materializer(model, seed=0)
    assert torch.equal(start.value("0.weight"), expected[0]) and torch.equal(start.value("1.weight"), expected[1])
    assert torch.equal(start.value("1.bias"), torch.full((64,), 2.0))
    loaded = nn.Linear(64, 64)
    model[1].load_state_dict(loaded.state_dict(), assign=True)
    model[0].weight = nn.Parameter(torch.ones(64, 64))
    start = materializer(model, seed=0)
    assert torch.equal(start.value("1.weight"), loaded.weight) and torch.equal(
        start.value("0.weight"), torch.ones(64, 64)
    )


def test_edits_in_a_second_context_count_and_do_not_hide_those_between():
    model = recorded()
    with partitioned_init():
        nn.init.constant_(model[1].weight, 3.0)
    assert torch.equal(materializer(model, seed=0).value("1.weight"), torch.full((64, 64), 3.0))
    written(model[1].weight)
    with partitioned_init():
        nn.init.constant_(model[0].weight, 1.0)
        model[1].weight.detach().mul_(2)
    with pytest.raises(PolyscaleError, match=r"1\.weight was edited"):
        materializer(model, seed=0)


@pytest.mark.parametrize(
    "cast",
    [
        lambda model: model.bfloat16(),
        lambda model: model.half(),
        lambda model: model.to(torch.float64),
        lambda model: model.to_empty(device="meta"),
    ],
)
def test_a_cast_of_all_weights_after_the_context_is_no_meta_start(cast):
    """Every weight has lost its recording, so the model looks like one that was built on the meta device."""
    with pytest.raises(PolyscaleError, match=r"0\.weight was cast or replaced after the block") as caught:
        materializer(cast(recorded()), seed=0)
    assert "inside" in caught.value.fix and "dtype" in caught.value.fix
    with partitioned_init():
        parameter = nn.Parameter(torch.randn(2000))  # no operator has ever seen this object
        module = nn.ParameterList([parameter])
    with pytest.raises(PolyscaleError, match=r"0 was cast"):
        materializer(cast(module), seed=0)


@pytest.mark.parametrize("make", [lambda: torch.randn(50, 50), lambda: torch.randn(50, 50).t()])
def test_buffers_count_too(make):
    with partitioned_init():
        module = nn.Linear(64, 64)
        module.register_buffer("table", make())
    materializer(module, seed=0)
    module.table.zero_()
    with pytest.raises(PolyscaleError, match="table was edited"):
        materializer(module, seed=0)
    module.table = module.table.double()  # a new tensor
    with pytest.raises(PolyscaleError, match="table is on the meta device without a recording"):
        materializer(module, seed=0)


def test_pretrained_weights_survive_a_cast_inside_and_are_never_replaced_by_random_ones(tmp_path):
    torch.manual_seed(0)
    saved = MODELS["gpt2"]().requires_grad_(False)
    saved.save_pretrained(tmp_path)
    expected = {name: tensor.bfloat16() for name, tensor in tensors_of(saved).items()}

    def load():
        return transformers.GPT2LMHeadModel.from_pretrained(tmp_path)

    def recorded_load():
        model = MODELS["gpt2"]()
        model.load_state_dict(saved.state_dict())
        return model

    for make in (load, recorded_load):
        with partitioned_init():
            model = make().to(torch.bfloat16)
        start = materializer(model, seed=0)
        assert all(torch.equal(start.value(name), value) for name, value in expected.items())
    with partitioned_init():
        model = load()
    start = materializer(model.to(torch.bfloat16), seed=0)  # it holds what it has read, recorded is nothing
    assert start.kind == "real" and all(torch.equal(start.value(name), value) for name, value in expected.items())
    with partitioned_init():
        model = recorded_load()
    with pytest.raises(PolyscaleError, match=r"transformer\.wte\.weight was cast or replaced"):
        materializer(model.to(torch.bfloat16), seed=0)


def test_an_unknown_name_is_an_error_with_the_nearest():
    start = materializer(nn.Linear(2, 2), seed=0)
    with pytest.raises(PolyscaleError, match="weight"):
        start.value("wieght")
