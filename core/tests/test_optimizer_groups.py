"""Granularity of optimizers, and how parameters fall into groups."""

import pytest
import torch

from polyscale.config import OptimizerSection
from polyscale.errors import ConfigError, UnsupportedError
from polyscale.optimizers import granularity_of, norm_parameters, split_groups
from polyscale.parameters.info import ParamInfo


def infos(**shapes):
    return {name.replace("__", "."): info(name.replace("__", "."), shape) for name, shape in shapes.items()}


def info(name, shape, *, requires_grad=True, tied_to=()):
    return ParamInfo(name, tuple(shape), torch.float32, requires_grad, tied_to=tied_to)


def section(*groups, skip=False):
    made = [{"match": match, "params": params} for match, params in groups]
    return OptimizerSection.model_validate({"type": "AdamW", "groups": made, "skip_decay_for_norms_and_biases": skip})


MODEL = infos(
    embed__weight=(8, 4), layer__weight=(4, 4), layer__bias=(4,), norm__weight=(4,), wide__bias=(1, 4), scalar=()
)


def test_without_configuration_there_is_one_group():
    assert split_groups(None, MODEL) == [(list(MODEL), {})]


def test_first_matching_group_takes_a_parameter_and_the_rest_comes_last():
    got = split_groups(section((["layer.*"], {"lr": 0.1}), (["*.bias", "embed.*"], {"lr": 0.2})), MODEL)
    assert got == [
        (["layer.weight", "layer.bias"], {"lr": 0.1}),
        (["embed.weight", "wide.bias"], {"lr": 0.2}),
        (["norm.weight", "scalar"], {}),
    ]


def test_the_switch_spares_norms_biases_and_vectors():
    got = split_groups(section(skip=True), MODEL | infos(ln__scale=(2, 2)), {"ln.scale"})
    assert got == [
        (["embed.weight", "layer.weight"], {}),
        (["layer.bias", "norm.weight", "wide.bias", "scalar", "ln.scale"], {"weight_decay": 0.0}),
    ]


def test_the_switch_works_inside_groups_and_yields_to_their_own_weight_decay():
    got = split_groups(section((["layer.*"], {"lr": 0.1}), (["*.bias"], {"weight_decay": 0.3}), skip=True), MODEL)
    assert got == [
        (["layer.weight"], {"lr": 0.1}),
        (["layer.bias"], {"lr": 0.1, "weight_decay": 0.0}),
        (["wide.bias"], {"weight_decay": 0.3}),
        (["embed.weight"], {}),
        (["norm.weight", "scalar"], {"weight_decay": 0.0}),
    ]


def test_frozen_parameters_are_in_no_group_and_tied_ones_in_one():
    tied = info("wte.weight", (4, 4), tied_to=("lm_head.weight",))
    model = {
        "wte.weight": tied,
        "lm_head.weight": tied,
        "frozen": info("frozen", (2,), requires_grad=False),
        "w": info("w", (2, 2)),
    }
    assert split_groups(section((["lm_head.*"], {"lr": 0.1})), model) == [(["wte.weight"], {"lr": 0.1}), (["w"], {})]


def test_a_pattern_that_matches_nothing_is_an_error_with_the_nearest_name():
    with pytest.raises(ConfigError, match=r"'layer\.wieght'.*Did you mean 'layer\.weight'"):
        split_groups(section((["layer.wieght"], {"lr": 0.1})), MODEL)


def test_norm_layers_are_found_by_what_their_class_is_called():
    class LlamaRMSNorm(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(2))

    model = torch.nn.ModuleDict(
        {
            "a": torch.nn.LayerNorm(2),
            "b": torch.nn.Linear(2, 2),
            "c": torch.nn.Sequential(LlamaRMSNorm(), torch.nn.BatchNorm1d(2)),
        }
    )
    assert norm_parameters(model.named_modules()) == {"a.weight", "a.bias", "c.0.weight", "c.1.weight", "c.1.bias"}
    assert norm_parameters(torch.nn.LayerNorm(2).named_modules()) == {"weight", "bias"}


def test_torch_classes_that_update_each_element_by_itself():
    param = torch.nn.Parameter(torch.zeros(2, 2))
    for cls in (torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop, torch.optim.Rprop, torch.optim.ASGD):
        assert granularity_of(cls) == "element"
        assert granularity_of(cls([param], lr=0.1)) == "element"


def test_unknown_classes_count_as_tensor_and_may_declare_more():
    class Subclass(torch.optim.AdamW):
        pass

    class Declared(torch.optim.Optimizer):
        granularity = "matrix"

    class Wrong(torch.optim.Optimizer):
        granularity = "row"

    assert granularity_of(Subclass) == "tensor"
    assert granularity_of(torch.optim.Adafactor) == "tensor"
    assert granularity_of(Declared) == "matrix"
    with pytest.raises(ConfigError, match="element, norm, matrix, tensor"):
        granularity_of(Wrong)


def test_classes_that_cannot_work_on_shards_are_refused_with_what_works():
    class Subclass(torch.optim.LBFGS):
        pass

    for cls, reason in (
        (torch.optim.LBFGS, "line search"),
        (Subclass, "line search"),
        (torch.optim.SparseAdam, "dense"),
    ):
        with pytest.raises(UnsupportedError, match=f"{reason}.*AdamW"):
            granularity_of(cls)
    with pytest.raises(UnsupportedError, match='"type": "Muon"'):
        granularity_of(torch.optim.Muon)
