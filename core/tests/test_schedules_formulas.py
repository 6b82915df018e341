"""The formulas against tables computed by hand from their definitions, without torch."""

import math

import pytest

from polyscale.config import load_config
from polyscale.errors import ConfigError
from polyscale.schedules import formulas
from polyscale.schedules.curves import CURVES, momentum
from polyscale.schedules.parameters import SCHEDULES, checked


def curve(name, steps, base=1.0, **params):
    full = checked(name, params)
    return [CURVES[name](k, full, 0, base) for k in range(steps)]


def test_range_test_rises_by_its_rate_every_interval():
    params = {"lr_range_test_min_lr": 0.1, "lr_range_test_step_size": 4, "lr_range_test_step_rate": 2.0}
    assert curve("LRRangeTest", 6, **params) == pytest.approx([0.1, 0.15, 0.2, 0.25, 0.3, 0.35])
    stairs = curve("LRRangeTest", 9, **params, lr_range_test_staircase=True)
    assert stairs == pytest.approx([0.1, 0.1, 0.1, 0.1, 0.3, 0.3, 0.3, 0.3, 0.5])


def test_one_cycle_goes_up_down_and_decays():
    params = {"cycle_min_lr": 1.0, "cycle_max_lr": 3.0, "cycle_first_step_size": 2, "cycle_second_step_size": 4}
    assert curve("OneCycle", 8, **params) == pytest.approx([1, 2, 3, 2.5, 2, 1.5, 1, 1])
    decayed = curve("OneCycle", 11, **params, decay_lr_rate=0.5, decay_step_size=2)
    assert decayed[6:] == pytest.approx([1, 1 / 1.25, 1 / 1.5, 1 / 1.75, 1 / 2])
    assert curve("OneCycle", 5, cycle_min_lr=0.0, cycle_max_lr=2.0, cycle_first_step_size=2) == [0, 1, 2, 1, 0]


def test_one_cycle_momentum_moves_against_the_learning_rate():
    params = {"cycle_min_lr": 1.0, "cycle_max_lr": 3.0, "cycle_first_step_size": 2, "decay_step_size": 1}
    full = checked("OneCycle", {**params, "cycle_min_mom": 0.5, "cycle_max_mom": 0.9, "decay_mom_rate": 0.1})
    assert [momentum("OneCycle", k, full) for k in range(6)] == pytest.approx([0.9, 0.7, 0.5, 0.7, 0.9, 0.99])
    assert momentum("OneCycle", 1, checked("OneCycle", {**params, "cycle_momentum": False})) is None
    assert momentum("WarmupLR", 1, checked("WarmupLR", {})) is None


def test_stairs_round_the_height_down():
    heights = [formulas.one_cycle_scale(k, first=3, second=4, first_stairs=3, second_stairs=2) for k in range(8)]
    assert heights == [0, 1 / 3, 2 / 3, 1, 0.5, 0.5, 0, 0]
    heights = [formulas.one_cycle_scale(k, first=4, second=4, first_stairs=2, second_stairs=4) for k in range(9)]
    assert heights == [0, 0, 0.5, 0.5, 1, 0.75, 0.5, 0.25, 0]


def test_warm_up_by_line_and_by_logarithm():
    line = curve("WarmupLR", 6, warmup_min_lr=0.2, warmup_max_lr=1.0, warmup_num_steps=4, warmup_type="linear")
    assert line == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0])
    log = curve("WarmupLR", 6, warmup_max_lr=2.0, warmup_num_steps=4)
    assert log == pytest.approx([0.0, 1.0, 2 * math.log(3) / math.log(4), 2.0, 2.0, 2.0])
    assert curve("WarmupLR", 3, base=0.5, warmup_num_steps=1) == [0.0, 0.5, 0.5]


def test_warm_up_and_linear_decay():
    params = {"total_num_steps": 6, "warmup_num_steps": 2, "warmup_max_lr": 1.0, "warmup_type": "linear"}
    assert curve("WarmupDecayLR", 9, **params) == pytest.approx([0, 0.5, 1, 0.75, 0.5, 0.25, 0, 0, 0])
    above = curve("WarmupDecayLR", 9, **params, warmup_min_lr=0.2)
    assert above == pytest.approx([0.2, 0.6, 1, 0.8, 0.6, 0.4, 0.2, 0.2, 0.2])


def test_warm_up_and_cosine_are_shares_of_the_groups_own_learning_rate():
    params = {"total_num_steps": 6, "warmup_num_steps": 2, "warmup_type": "linear"}
    full = curve("WarmupCosineLR", 9, base=4.0, **params, warmup_min_ratio=0.5, cos_min_ratio=0.25)
    bend = math.sqrt(0.5)
    cosine = [4 * (0.25 + 0.75 * (1 + c) / 2) for c in (1, bend, 0, -bend, -1, -1, -1)]
    assert full == pytest.approx([2.0, 3.0, *cosine])


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_a_parameter_per_group_is_used_by_its_group(name):
    lists = {key: [1.0, 2.0] for key, parameter in SCHEDULES[name].items() if parameter.per_group}
    if not lists:
        pytest.skip("it has none")
    full = checked(name, {**({"total_num_steps": 2000} if name == "WarmupDecayLR" else {}), **lists})
    one, two = (CURVES[name](5, full, group, 1.0) for group in (0, 1))
    assert two == pytest.approx(2 * one)


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("WarmupDecayLR", {}, r"without scheduler\.params\.total_num_steps"),
        ("OneCycle", {"cycle_min_lr": 1}, r"without scheduler\.params\.cycle_max_lr"),
        ("WarmupLR", {"warmup_num_step": 3}, r"Unknown key scheduler\.params\.warmup_num_step: .*'warmup_num_steps'"),
        ("WarmupLR", {"warmup_num_steps": 0}, "expected a whole number of at least 1"),
        ("WarmupLR", {"warmup_num_steps": "ten"}, "warmup_num_steps = 'ten'"),
        ("WarmupLR", {"warmup_num_steps": True}, "warmup_num_steps = True"),
        ("WarmupLR", {"warmup_max_lr": "nan"}, "warmup_max_lr = 'nan'"),
        ("WarmupLR", {"warmup_type": "cosine"}, '"log" or "linear"'),
        ("WarmupLR", {"warmup_max_lr": float("nan")}, "warmup_max_lr = nan"),
        ("WarmupLR", {"warmup_max_lr": -1}, "of at least 0, or a list"),
        ("WarmupLR", {"warmup_min_lr": None}, "warmup_min_lr = None"),
        ("WarmupLR", {"warmup_min_lr": []}, r"warmup_min_lr = \[\]"),
        ("WarmupCosineLR", {"total_num_steps": 10}, "would end before its warm-up"),
        ("LRRangeTest", {"lr_range_test_staircase": 1}, "true or false"),
    ],
)
def test_wrong_parameters_are_named(name, params, message):
    for call in (lambda: checked(name, params), lambda: load_config({"scheduler": {"type": name, "params": params}})):
        with pytest.raises(ConfigError, match=message):
            call()
