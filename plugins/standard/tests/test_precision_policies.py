"""Policies of the three precisions, from real configurations."""

import pytest
import torch

from polyscale import PluginContext, load_config
from polyscale.errors import ConfigError
from polyscale.interfaces.precision import LossScaler, Precision
from polyscale_standard.casting import matches
from polyscale_standard.precision import Bf16Plugin, DynamicLossScaler, Fp16Plugin, Fp32Plugin, StaticLossScaler

fp32, fp64, bf16, fp16 = torch.float32, torch.float64, torch.bfloat16, torch.float16


def made(plugin, config=None, **options):
    loaded = load_config({"train_batch_size": 1, **config}) if config is not None else None
    precision = plugin().polyscale_precision(PluginContext("x", options=options, config=loaded))
    assert isinstance(precision, Precision)
    return precision


def dtypes(policy):
    return policy.parameter, policy.master, policy.accumulation, policy.reduction


@pytest.mark.parametrize(
    ("plugin", "name", "expected"),
    [
        (Fp32Plugin, "fp32", (None, None, None, None)),
        (Bf16Plugin, "bf16", (bf16, fp32, fp32, fp32)),
        (Fp16Plugin, "fp16", (fp16, fp32, fp32, fp32)),
    ],
)
def test_masters_accumulation_and_reduction_are_wide_by_default(plugin, name, expected):
    for config in (None, {}):
        precision = made(plugin, config)
        assert precision.name == name
        assert dtypes(precision.policy()) == expected
        assert precision.policy().pinned == ()


def test_communication_data_type_changes_the_reduction_alone():
    policy = made(Bf16Plugin, {"bf16": {"enabled": True}, "communication_data_type": "bf16"}).policy()
    assert dtypes(policy) == (bf16, fp32, fp32, bf16)


def test_data_types_change_accumulation_and_compute():
    policy = made(Fp32Plugin, {"data_types": {"grad_accum_dtype": "fp64", "param_dtype": "bf16"}}).policy()
    assert dtypes(policy) == (bf16, fp32, fp64, fp32)


def test_gradients_are_never_added_in_16_bits():
    with pytest.raises(ConfigError, match="grad_accum_dtype"):
        made(Bf16Plugin, {"data_types": {"grad_accum_dtype": "bf16"}}).policy()


def test_keep_in_fp32_modules_pins_modules_by_name_and_by_pattern():
    config = {"data_types": {"keep_in_fp32_modules": ["norm", "*.router.weight"]}}
    pinned = made(Bf16Plugin, config).policy().pinned

    def is_pinned(name):
        return any(matches(name, given) for given in pinned)

    for name in ("norm", "norm.weight", "layers.0.norm.weight", "layers.0.norm.inner.bias", "a.router.weight"):
        assert is_pinned(name), name
    for name in ("normal.weight", "layers.0.prenorm.weight", "a.router.bias", "embed.weight"):
        assert not is_pinned(name), name


def test_auto_pins_nothing_here():
    assert made(Bf16Plugin, {"data_types": {"keep_in_fp32_modules": "auto"}}).policy().pinned == ()


def test_only_fp16_scales_the_loss():
    assert made(Fp32Plugin).scaler() is None
    assert made(Bf16Plugin).scaler() is None
    scaler = made(Fp16Plugin).scaler()
    assert isinstance(scaler, DynamicLossScaler)
    assert scaler.scale == 2.0**16


def test_each_scaler_is_a_fresh_one():
    precision = made(Fp16Plugin, {"fp16": {"enabled": True, "hysteresis": 1}})
    first: LossScaler = precision.scaler()
    first.update(True)
    assert (first.scale, precision.scaler().scale) == (2.0**15, 2.0**16)


def test_fp16_settings_reach_the_scaler():
    fp16_section = {
        "enabled": True,
        "initial_scale_power": 4,
        "loss_scale_window": 2,
        "hysteresis": 1,
        "min_loss_scale": 8.0,
    }
    scaler = made(Fp16Plugin, {"fp16": fp16_section}, max_skips_at_floor=1).scaler()
    seen = [scaler.scale]
    for overflow in (False, False, True, True, True):
        scaler.update(overflow)
        seen.append(scaler.scale)
    assert seen == [16, 16, 32, 16, 8, 8]
    assert scaler.exhausted


def test_a_positive_loss_scale_is_static():
    scaler = made(Fp16Plugin, {"fp16": {"enabled": True, "loss_scale": 128.0}}).scaler()
    assert isinstance(scaler, StaticLossScaler)
    assert scaler.scale == 128.0


def test_consecutive_hysteresis_reaches_the_scaler():
    section = {"enabled": True, "consecutive_hysteresis": True}
    scaler = made(Fp16Plugin, {"fp16": section}).scaler()
    for overflow in (True, False, True):
        scaler.update(overflow)
    assert scaler.scale == 2.0**16


def test_unknown_dtype_names_the_nearest():
    from polyscale_standard.precision.plugins import dtype

    with pytest.raises(ConfigError, match="Did you mean 'bf16'"):
        dtype("bf61", "communication_data_type")
