"""How fsdp2 finds what to shard together."""

import pytest
from torch import nn

import polyscale
from polyscale.parameters.units import choose_units
from polyscale.testing import tiny_gpt2


def _block():
    return nn.Sequential(nn.Linear(4, 4), nn.GELU())


def test_repeated_blocks_of_a_transformer_are_the_units():
    model = tiny_gpt2()
    assert choose_units(model) == list(model.transformer.h)


def test_lists_of_single_layers_and_single_blocks_are_no_units():
    assert choose_units(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))) == []
    assert choose_units(nn.ModuleDict({"x": nn.ModuleList([_block(), nn.Linear(4, 4)])})) == []


def test_blocks_followed_by_a_head_are_units_also_at_the_root():
    model = nn.Sequential(_block(), _block(), nn.Linear(4, 2))
    assert choose_units(model) == [model[0], model[1]]


def test_only_the_outermost_list_is_taken():
    outer = nn.ModuleList(nn.ModuleDict({"experts": nn.ModuleList(_block() for _ in range(3))}) for _ in range(2))
    assert choose_units(nn.ModuleDict({"layers": outer})) == list(outer)


def test_a_block_that_shares_a_weight_stays_with_the_root():
    blocks = nn.ModuleList(_block() for _ in range(3))
    blocks[2][0].weight = blocks[0][0].weight
    assert choose_units(nn.ModuleDict({"blocks": blocks})) == [blocks[1]]


def test_one_block_that_stands_twice_is_one_unit():
    block = _block()
    blocks = nn.ModuleList([block, _block(), block])
    assert choose_units(nn.ModuleDict({"blocks": blocks})) == [block, blocks[1]]


def test_units_by_class_name():
    model = tiny_gpt2()
    assert len(choose_units(model, ["GPT2MLP"])) == len(model.transformer.h)
    with pytest.raises(polyscale.ConfigError, match="GPT2Block"):
        choose_units(model, ["GPT2Blok"])
    for name in ("fsdp2", "zero"):
        backends = {"data_parallel": name, "options": {name: {"unit_class": ["GPT2Block"]}}}
        with pytest.raises(polyscale.ConfigError, match="unit_classes"):
            polyscale.initialize(model, config={"zero_optimization": {"stage": 3}, "backends": backends})
