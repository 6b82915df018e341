"""Optimizers over flat shards: who is refused, and how a callable and an instance come to fragments."""

import pytest
import torch
from torch import nn

import polyscale
from polyscale.engine.optimizer import build_optimizer
from polyscale.errors import UnsupportedError
from polyscale.interfaces.parallelism import DataParallelApplied, Part
from polyscale.optimizers import refuse_flat
from polyscale_standard.ddp.store import ReplicatedStore


class FlatStore(ReplicatedStore):
    """Gives optimizers 1-D ranges, as flat shards do: all of a tensor, or nothing of it (``bias``)."""

    flat = True

    def optimizer_parameter(self, fqn, granularity):
        if fqn not in self.__dict__.setdefault("ranges", {}):
            flat = self._masters[fqn].data.view(-1)
            self.ranges[fqn] = nn.Parameter(flat[:0] if fqn == "bias" else flat)
        return self.ranges[fqn]


class Own(torch.optim.Optimizer):
    """Of unknown granularity: uses a norm."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                param.data.sub_(param.grad / param.grad.norm(), alpha=group["lr"])


class OwnElement(Own):
    granularity = "element"


class OwnTensor(Own):
    granularity = "tensor"


@pytest.fixture
def build():
    """Build an optimizer over flat shards: ``build(given, **config)``; with the attributes ``store`` and ``model``."""
    model = nn.Linear(3, 2)
    names = {parameter: name for name, parameter in model.named_parameters()}
    with polyscale.initialize(model, config={"train_micro_batch_size_per_gpu": 1}) as engine:
        store = engine.parameters_store
        store.__class__ = FlatStore

        def made(given, **config):
            applied = DataParallelApplied([Part(model)], store=store)
            accelerator = engine._setup.accelerator
            return build_optimizer(given, polyscale.load_config(config), applied, names, accelerator, set())

        made.store, made.model = store, model
        yield made


def fragments(build, optimizer):
    return [
        next(name for name, own in build.store.ranges.items() if own is param)
        for group in optimizer.param_groups
        for param in group["params"]
    ]


@pytest.mark.parametrize("cls", [Own, OwnTensor, torch.optim.Adafactor], ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("way", ["callable", "instance"])
def test_a_class_that_looks_at_whole_tensors_is_refused_and_an_instance_left_as_it_was(build, cls, way):
    whole = list(build.model.parameters())
    given = cls(whole) if way == "instance" else lambda params: cls(params)
    with pytest.raises(UnsupportedError) as caught:
        build(given)
    error = caught.value
    assert cls.__name__ in error.given and "flat shards" in error.given
    reasons = {
        "Own": "nothing says",
        "OwnTensor": "it says that it needs whole tensors",
        "Adafactor": "rows and columns",
    }
    assert reasons[cls.__name__] in error.why
    for word in ("AdamW", "SGD", "Lion", "LAMB", "Muon", "granularity = 'element'", "stage 0"):
        assert word in error.fix
    if way == "instance":
        assert given.param_groups[0]["params"] == whole


def test_a_class_of_torch_by_name_that_looks_at_whole_tensors_is_refused(build):
    with pytest.raises(UnsupportedError, match="Optimizer Adafactor over flat shards: it factors"):
        build(None, optimizer={"type": "Adafactor"})


@pytest.mark.parametrize("kind", ["AdamW", "Lamb", "Muon", "NAdam"])
def test_others_by_name_get_fragments(build, kind):
    optimizer = build(None, optimizer={"type": kind})
    assert sorted(fragments(build, optimizer)) == ["bias", "weight"]


def test_a_callable_sees_whole_shapes_and_trains_fragments(build):
    seen = []

    def split(params):
        seen.extend(params)
        decayed = [param for param in seen if param.ndim > 1]
        others = [param for param in seen if param.ndim <= 1]
        return torch.optim.AdamW([{"params": decayed}, {"params": others, "weight_decay": 0.0}], lr=0.1, fused=True)

    optimizer = build(split)
    assert [tuple(param.shape) for param in seen] == [(2, 3), (2,)]
    assert fragments(build, optimizer) == ["weight", "bias"]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.01, 0.0]
    for name, own in build.store.ranges.items():
        own.grad = torch.ones_like(own)
        assert own.dim() == 1 and (own.numel() == 0) == (name == "bias")
    before = build.store.ranges["weight"].detach().clone()
    optimizer.step()
    assert not torch.equal(before, build.store.ranges["weight"])


def test_states_that_a_constructor_makes_fit_the_fragments(build):
    optimizer = build(lambda params: torch.optim.Adagrad(params, lr=0.1, initial_accumulator_value=0.5))
    for own in build.store.ranges.values():
        assert torch.equal(optimizer.state[own]["sum"], torch.full_like(own, 0.5))
        own.grad = torch.ones_like(own)
    optimizer.step()


def test_a_class_that_says_element_is_believed(build):
    assert fragments(build, build(lambda params: OwnElement(params)))
    for granularity in ("element", "norm", "matrix"):
        refuse_flat(Own, granularity)
