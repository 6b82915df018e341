"""partitioned_init against the eager construction: every tensor and the random state, bit by bit."""

import copy
import gc
import warnings

import numpy
import pytest
import torch
import transformers
from torch import nn
from torch.nn.utils import parametrizations

from polyscale import PolyscaleError, partitioned_init
from polyscale.parameters.deferred import forget, is_deferred, replay

torch.set_num_threads(1)
SMALL = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 64,
}


def gpt2():
    config = transformers.GPT2Config(
        n_layer=2, n_embd=64, n_head=2, vocab_size=128, n_positions=64, bos_token_id=0, eos_token_id=1
    )
    return transformers.GPT2LMHeadModel(config)


def llama_bf16():
    config = transformers.LlamaConfig(num_key_value_heads=1, **SMALL)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


MODELS = {
    "linear": lambda: nn.Linear(64, 64),
    "embedding": lambda: nn.Embedding(100, 64, padding_idx=3),
    "convolution": lambda: nn.Sequential(nn.Conv2d(16, 32, 3), nn.BatchNorm2d(2048), nn.LayerNorm(2048)),
    "recurrent": lambda: nn.LSTM(32, 32, 2),
    "transformer": lambda: nn.Transformer(32, 2, 1, 1, 64, batch_first=True),
    "weight_norm": lambda: parametrizations.weight_norm(nn.Linear(50, 50)),
    "spectral_norm": lambda: parametrizations.spectral_norm(nn.Linear(50, 50)),
    "gpt2": gpt2,
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(num_key_value_heads=1, **SMALL)),
    "llama_bf16": llama_bf16,
    "bert": lambda: transformers.BertForMaskedLM(transformers.BertConfig(**SMALL)),
    "mixtral": lambda: transformers.MixtralForCausalLM(
        transformers.MixtralConfig(num_local_experts=2, num_key_value_heads=1, **SMALL)
    ),
}


def tensors_of(module):
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    return dict(named)


def build(make, seed=0, **options):
    """(eager, deferred, state after eager, state after deferred)."""
    torch.manual_seed(seed)
    eager = make()
    after_eager = torch.get_rng_state()
    torch.manual_seed(seed)
    with partitioned_init(**options):
        deferred = make()
    return eager, deferred, after_eager, torch.get_rng_state()


def assert_equals_eager(make, *, threshold=1024, allowed_real=(), **options):
    eager, deferred, state_eager, state = build(make, threshold=threshold, **options)
    assert torch.equal(state_eager, state)
    expected, found = tensors_of(eager), tensors_of(deferred)
    assert list(expected) == list(found)
    for name, value in expected.items():
        mine = found[name]
        large = value.is_floating_point() and value.numel() >= threshold
        if large and name not in allowed_real:
            assert mine.is_meta and is_deferred(mine), name
        assert mine.requires_grad == value.requires_grad and type(mine) is type(value), name
        real = replay(mine) if is_deferred(mine) else mine
        assert real.dtype == value.dtype and real.stride() == value.stride(), name
        assert torch.equal(real, value), name
    assert torch.equal(state, torch.get_rng_state())  # replaying drew nothing


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("threshold", [1, 1024])
def test_weights_and_random_state_equal_the_eager_start(name, threshold):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "enable_nested_tensor")
        assert_equals_eager(MODELS[name], threshold=threshold)


@pytest.mark.parametrize(
    ("initialiser", "arguments"),
    [
        (nn.init.uniform_, ()),
        (nn.init.normal_, (1.0, 0.5)),
        (nn.init.constant_, (3.0,)),
        (nn.init.ones_, ()),
        (nn.init.zeros_, ()),
        (nn.init.eye_, ()),
        (nn.init.xavier_uniform_, ()),
        (nn.init.xavier_normal_, ()),
        (nn.init.kaiming_uniform_, ()),
        (nn.init.kaiming_normal_, ()),
        (nn.init.trunc_normal_, ()),
        (nn.init.trunc_normal_, (0.0, 1.0, -1.0, 1.0)),  # many rejected samples: control flow depends on values
        (nn.init.trunc_normal_, (0.0, 1.0, 2.0, 4.0)),
        (nn.init.orthogonal_, ()),
        (nn.init.sparse_, (0.3,)),
    ],
)
def test_initialisers_of_torch(initialiser, arguments):
    def make():
        module = nn.Module()
        module.weight = nn.Parameter(torch.empty(30, 40))
        initialiser(module.weight, *arguments)
        return module

    assert_equals_eager(make)


def _holder(**parameters):
    module = nn.Module()
    for name, value in parameters.items():
        module.register_parameter(name, nn.Parameter(value))
    return module


def test_ways_to_make_a_parameter():
    def make():
        module = _holder(
            joined=torch.cat([torch.randn(512) for _ in range(4)]),
            mixed=torch.cat([torch.randn(2000), torch.zeros(10)]),
            transposed=torch.randn(50, 40).t(),
            legacy=torch.Tensor(50, 50).normal_(),
            doubled=torch.randn(40, 40, dtype=torch.float64) * 2 + 1,
            own_generator=torch.rand(2000, generator=torch.Generator().manual_seed(3)),
            cast=torch.randn(50, 50).bfloat16(),
            counted=torch.zeros(3000) + torch.randperm(3000),
            line=torch.linspace(0, 1, 2000),
            complex=torch.complex(torch.randn(2000), torch.randn(2000)),
        )
        module.register_buffer("table", torch.outer(torch.arange(50.0), torch.arange(50.0)).sin())
        module.register_buffer("mask", torch.ones(50, 50, dtype=torch.bool).tril())
        return module

    assert_equals_eager(make)


def test_changes_through_data_views_and_values():
    def make():
        module = nn.Linear(50, 50)
        module.weight.data.normal_()
        module.weight.data = module.weight.data.clone()
        module.weight.data[3] = 7
        with torch.no_grad():
            for row in module.weight:
                row.div_(row.norm())
            module.weight[module.weight > 0.2] = 0.5
            module.weight.mul_(float(module.weight.sum()))  # a number that only a replay can give
        moved = module.weight.data.to("cpu")
        moved.add_(1)  # the same memory, as eagerly
        torch.manual_seed(5)
        module.extra = nn.Parameter(torch.empty(2000, device=module.weight.device))
        module.extra.data.copy_(torch.from_numpy(numpy.arange(2000.0)))
        module.extra.data = module.extra.data * module.weight.detach().numpy().mean()
        module.other = nn.Parameter(torch.zeros(2000).type_as(module.weight) + torch.rand_like(module.extra))
        module.other.data.mul_(torch.bernoulli(torch.full((2000,), 0.5)))
        module.loaded = nn.Parameter(torch.empty(2000))
        module.loaded.data = torch.from_numpy(numpy.arange(2000.0)).float()
        return module.double()

    assert_equals_eager(make)


def test_an_operator_that_reads_an_older_version_sees_that_version():
    def make():
        first = torch.randn(2000)
        second = first * 2
        first.add_(1)
        third = first + second
        fourth = first.clone()
        first.normal_()
        fourth.copy_(fourth)
        fourth.view(40, 50)[:40, :40].copy_(fourth.view(40, 50)[:40, :40].t().clone())
        return _holder(first=first, second=second, third=third, fourth=fourth)

    assert_equals_eager(make)


def test_ties_and_copies():
    def make():
        layer = nn.Linear(40, 40)
        module = nn.Sequential(layer, copy.deepcopy(layer), nn.Linear(40, 40))
        module[2].weight = layer.weight
        module[1].weight.data.add_(1)
        return module

    assert_equals_eager(make)
    with partitioned_init():
        module = make()
    assert module[0].weight is module[2].weight


def test_code_inside_sees_the_device_of_an_eager_start():
    with partitioned_init():
        weight = nn.Linear(64, 64).weight
        assert weight.device == torch.device("cpu") and not weight.is_meta and weight.is_cpu
        assert torch.zeros(3, device=weight.device).tolist() == [0.0, 0.0, 0.0]
        assert weight[:2].tolist() == replay(weight)[:2].tolist()
    assert weight.is_meta


def test_what_is_asked_for_on_meta_stays_empty():
    with partitioned_init(), torch.device("meta"):
        layer = nn.Linear(64, 64)
    assert layer.weight.is_meta and not is_deferred(layer.weight)
    with partitioned_init(), pytest.raises(PolyscaleError, match="no values"):
        torch.randn(64, 64).add_(torch.empty(64, 64, device="meta"))


def test_replay_gives_views_and_devices_and_is_repeatable():
    with partitioned_init():
        weight = nn.Linear(64, 64).weight
    whole = replay(weight)
    assert torch.equal(replay(weight), whole) and not whole.requires_grad
    part = replay(weight[5:7])
    assert torch.equal(part, whole[5:7]) and part.untyped_storage().nbytes() == part.numel() * 4
    assert replay(weight, device="meta").is_meta
    with torch.device("meta"), torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(replay(weight), whole)


def test_one_weight_at_a_time_is_in_memory():
    """Counted by torch's own profiler: the largest amount that the context holds at any time."""

    def make():
        return nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(8)))

    one = 256 * 256 * 4
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, profile_memory=True) as profile, partitioned_init():
        model = make()
    held = largest = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            largest = max(largest, held)
    assert one <= largest < 2 * one
    assert len(list(model.parameters())) == 8


def test_an_overwritten_start_is_not_kept():
    def states():
        gc.collect()
        return sum(
            1 for o in gc.get_objects() if type(o) is torch.Tensor and o.dtype == torch.uint8 and o.numel() > 5000
        )

    before = states()
    with partitioned_init():
        layer = nn.Linear(64, 64)
        for _ in range(5):
            nn.init.normal_(layer.weight)
    assert states() - before <= 1


def test_forget_frees_the_recording():
    with partitioned_init():
        layer = nn.Linear(64, 64)
    forget(layer)
    assert layer.weight.is_meta and not is_deferred(layer.weight)
    with pytest.raises(PolyscaleError, match="partitioned_init"):
        replay(layer.weight)


def test_nested_contexts_are_one_and_torch_is_as_before():
    names = ("empty", "normal_", "Tensor")
    before = [getattr(torch, name, None) for name in names], nn.Module.__init__, nn.Parameter.__new__
    torch.manual_seed(0)
    with partitioned_init(), partitioned_init(threshold=10**9):
        inner = nn.Linear(64, 64)
    torch.manual_seed(0)
    assert is_deferred(inner.weight) and torch.equal(replay(inner.weight), nn.Linear(64, 64).weight)
    assert before == ([getattr(torch, name, None) for name in names], nn.Module.__init__, nn.Parameter.__new__)
    assert not torch.empty(2000).is_meta


def test_an_error_inside_leaves_nothing_behind():
    with pytest.raises(ZeroDivisionError), partitioned_init():
        nn.Linear(64, 64)
        raise ZeroDivisionError
    assert not torch.empty(2000).is_meta
    with pytest.raises(RuntimeError), partitioned_init():
        torch.randn(50, 50) @ torch.randn(60, 60)


@pytest.mark.parametrize("threshold", [0, -1, 1.5, True, "x"])
def test_a_bad_threshold_is_refused(threshold):
    with pytest.raises(PolyscaleError, match="number of elements"), partitioned_init(threshold=threshold):
        pass
