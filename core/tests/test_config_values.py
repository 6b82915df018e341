"""Values of the wrong type or range, and values that cannot be true together."""

import re

import pytest

from polyscale.config import load_config
from polyscale.config.errors import BatchError, NotBuiltError, SeveralConfigErrors, WrongValueError
from polyscale.errors import ConfigError

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"train_batch_size": -4}, "train_batch_size = -4: expected at least 1"),
        ({"train_batch_size": 0}, "train_batch_size = 0: expected at least 1"),
        ({"train_batch_size": 2.5}, "train_batch_size = 2.5: expected a whole number"),
        ({"train_batch_size": "8"}, "train_batch_size = '8': expected a whole number"),
        ({"train_micro_batch_size_per_gpu": True}, "train_micro_batch_size_per_gpu = True: expected a whole number"),
        ({"gradient_accumulation_steps": -1}, "gradient_accumulation_steps = -1: expected at least 1"),
        ({"gradient_clipping": -0.5}, "gradient_clipping = -0.5: expected at least 0"),
        ({"gradient_clipping": NAN}, "gradient_clipping = nan: expected a finite number"),
        ({"gradient_clipping": INF}, "gradient_clipping = inf: expected a finite number"),
        ({"gradient_predivide_factor": 0}, "gradient_predivide_factor = 0: expected more than 0"),
        ({"seed": -1}, "seed = -1: expected at least 0"),
        ({"steps_per_print": 0}, "steps_per_print = 0: expected at least 1 or Infinity"),
        ({"steps_per_print": 2.5}, "steps_per_print = 2.5: expected a whole number or Infinity"),
        ({"steps_per_print": -INF}, "steps_per_print = -inf"),
        ({"steps_per_print": NAN}, "steps_per_print = nan"),
        ({"communication_data_type": "float8"}, 'communication_data_type = \'float8\': expected "fp16", "bf16"'),
        ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage = 4: expected at most 3"),
        ({"zero_optimization": {"stage": -1}}, "zero_optimization.stage = -1: expected at least 0"),
        ({"zero_optimization": {"stage": True}}, "zero_optimization.stage = True: expected a whole number"),
        ({"zero_optimization": 3}, "zero_optimization = 3: expected an object"),
        ({"zero_optimization": {"offload_param": {"device": "disk"}}}, "zero_optimization.offload_param.device ="),
        ({"zero_optimization": {"reduce_bucket_size": "big"}},
         "zero_optimization.reduce_bucket_size = 'big': expected a whole number or \"auto\""),
        ({"fp16": {"enabled": 1}}, "fp16.enabled = 1: expected true or false"),
        ({"fp16": {"loss_scale": -1}}, "fp16.loss_scale = -1: expected at least 0"),
        ({"fp16": {"loss_scale_window": 0}}, "fp16.loss_scale_window = 0: expected at least 1"),
        ({"fp16": {"min_loss_scale": 0}}, "fp16.min_loss_scale = 0: expected more than 0"),
        ({"optimizer": {}}, "optimizer.type: expected a value: it must be given"),
        ({"optimizer": {"type": 3}}, "optimizer.type = 3: expected a string"),
        ({"optimizer": {"type": "SGD", "groups": [{"match": []}]}}, "optimizer.groups[0].match = []: expected a lis"),
        ({"optimizer": {"type": "SGD", "groups": [{"match": "a"}]}}, "optimizer.groups[0].match = 'a': expected a lis"),
        ({"optimizer": {"type": "SGD", "groups": [{"match": ["a", 3]}]}}, "optimizer.groups[0].match[1] = 3: expected"),
        ({"backends": {"options": {"fsdp2": 3}}}, "backends.options.fsdp2 = 3: expected an object"),
        ({"backends": {"accelerator": ""}}, "backends.accelerator = '': expected a string that is not empty"),
        ({"topology": {"dp_replicate": 0}}, "topology.dp_replicate = 0: expected at least 1"),
        ({"topology": {"dp_shard": 0}}, "topology.dp_shard = 0"),
        ({"topology": {"dp_shard": -2}}, "topology.dp_shard = -2: expected at least -1"),
        ({"data_types": {"keep_in_fp32_modules": "norm"}}, "data_types.keep_in_fp32_modules = 'norm': expected \"auto"),
        ({"timers": {"throughput": 3}}, "timers.throughput = 3: expected an object"),
        ({"autotuning": {"model_info": [1]}}, "autotuning.model_info = [1]: expected an object"),
        ({"train_batch_size": 10**30}, "expected less than"),
        ({"autotuning": 3}, "autotuning = 3: expected an object"),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 0}}},
         "scheduler.params.warmup_num_steps = 0: expected a whole number of at least 1"),
    ],
)  # fmt: skip
def test_a_wrong_value_is_named_with_path_value_and_what_is_expected(config, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_config(config)


def test_every_mistake_is_reported_at_once_and_once():
    with pytest.raises(SeveralConfigErrors) as error:
        load_config(
            {"fp16": {"enabled": "yes", "nosuch": 1}, "gradient_clipping": -1, "zero_optimization": {"stage": "auto"}}
        )
    assert [one.given for one in error.value.errors] == [
        "Unknown key fp16.nosuch", 'zero_optimization.stage = "auto"', "gradient_clipping = -1", "fp16.enabled = 'yes'",
    ]  # fmt: skip
    for one in error.value.errors:
        assert str(one) in str(error.value)


def test_what_is_wrong_does_not_hide_what_contradicts():
    with pytest.raises(SeveralConfigErrors) as error:
        load_config(
            {
                "train_batch_size": 7, "gradient_accumulation_steps": 2, "train_micro_batch_size_per_gpu": "x",
                "fp16": {"enabled": True}, "bf16": {"enabled": True, "check_grad_overflow": 3},
                "optimizer": {"type": "SGD", "params": {"lr": "auto"}, "groups": [{"match": ["a"]}, {"match": 3}]},
                "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 10, "warmup_num_steps": "auto"}},
            }
        )  # fmt: skip
    assert [one.given for one in error.value.errors] == [
        'optimizer.params.lr = "auto", scheduler.params.warmup_num_steps = "auto"',
        "train_micro_batch_size_per_gpu = 'x'", "optimizer.groups[1].match = 3", "bf16.check_grad_overflow = 3",
        "fp16.enabled true, bf16.enabled true", "train_batch_size 7, gradient_accumulation_steps 2",
    ]  # fmt: skip


def test_numbers_as_json_writes_them_are_accepted():
    config = load_config(
        {"zero_optimization": {"reduce_bucket_size": 5e8}, "steps_per_print": INF, "gradient_clipping": 1}
    )
    assert config.zero_optimization.reduce_bucket_size == 500_000_000
    assert isinstance(config.zero_optimization.reduce_bucket_size, int)
    assert (config.steps_per_print, config.gradient_clipping) == (INF, 1.0)
    assert load_config('{"steps_per_print": Infinity}').steps_per_print == INF


@pytest.mark.parametrize(
    ("config", "precision", "fp16", "bf16"),
    [
        ({}, "fp32", False, False),
        ({"fp16": {"enabled": True}}, "fp16", True, False),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": False}}, "bf16", False, True),
        ({"backends": {"precision": "bf16"}}, "bf16", False, True),
        ({"backends": {"precision": "fp16"}, "fp16": {"loss_scale": 8}}, "fp16", True, False),
        ({"backends": {"precision": "fp32"}, "bf16": {"enabled": False}}, "fp32", False, False),
        ({"backends": {"precision": "elsewhere"}}, "elsewhere", False, False),
    ],
)
def test_precision_follows_from_its_sections_and_the_backend(config, precision, fp16, bf16):
    loaded = load_config(config)
    assert (loaded.precision, loaded.fp16.enabled, loaded.bf16.enabled) == (precision, fp16, bf16)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "fp16.enabled true, bf16.enabled true"),
        ({"backends": {"precision": "fp32"}, "bf16": {"enabled": True}}, "'fp32', bf16.enabled true"),
        ({"backends": {"precision": "bf16"}, "fp16": {"enabled": True}}, "fp16.enabled true, bf16.enabled true"),
        ({"backends": {"precision": "bf16"}, "bf16": {"enabled": False}}, "'bf16', bf16.enabled false"),
    ],
)
def test_precisions_that_contradict_one_another_are_refused(config, message):
    with pytest.raises(WrongValueError, match=message):
        load_config(config)


def test_max_grad_norm_points_to_gradient_clipping():
    for optimizer in (
        {"type": "Adam", "params": {"max_grad_norm": 2.0}},
        {"type": "Adam", "groups": [{"match": ["*"], "params": {"max_grad_norm": 2.0}}]},
    ):
        with pytest.raises(WrongValueError, match=r"max_grad_norm = 2.0.*gradient_clipping: 2.0"):
            load_config({"optimizer": optimizer})


@pytest.mark.parametrize("name", ["OneBitAdam", "ZeroOneAdam", "OneBitLamb", "MuAdam", "MuAdamW", "MuSGD"])
def test_an_optimizer_that_is_not_built_says_what_is_nearest(name):
    with pytest.raises(NotBuiltError, match=rf"optimizer.type = '{name}'.*nearest that works: '(adam|adamw|lamb|sgd)'"):
        load_config({"optimizer": {"type": name}})


def numbers(train=None, micro=None, accumulation=None):
    pairs = {
        "train_batch_size": train,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": accumulation,
    }
    return load_config({key: value for key, value in pairs.items() if value is not None})


@pytest.mark.parametrize(
    ("given", "world", "expected"),
    [
        ((16, 2, 4), 2, (16, 2, 4)),
        ((16, 2, None), 2, (16, 2, 4)),
        ((16, None, 4), 2, (16, 2, 4)),
        ((None, 2, 4), 2, (16, 2, 4)),
        ((16, None, None), 2, (16, 8, 1)),
        ((None, 2, None), 3, (6, 2, 1)),
        ((None, None, 4), 2, (8, 1, 4)),
        ((None, None, None), 4, (4, 1, 1)),
    ],
)
def test_the_batch_triangle_is_completed(given, world, expected):
    batch = numbers(*given).batch(world)
    assert (batch.train, batch.micro, batch.accumulation) == expected
    assert batch.train == batch.micro * batch.accumulation * world


@pytest.mark.parametrize(
    ("given", "world"),
    [((16, 2, 3), 2), ((16, 2, 4), 3), ((16, 4, None), 3), ((16, None, 8), 3), ((5, None, None), 2), ((2, 2, None), 4)],
)
def test_batch_numbers_that_do_not_multiply_show_the_numbers_and_a_way_out_that_multiplies(given, world):
    with pytest.raises(BatchError) as error:
        numbers(*given).batch(world)
    text = str(error.value)
    for number in [value for value in given if value is not None]:
        assert str(number) in error.value.given
    proposed = re.search(r"Nearest that multiplies: train_batch_size (\d+)", text)
    assert proposed
    train, micro, accumulation = int(proposed[1]), given[1], given[2]
    if " on " in error.value.fix:
        world = int(re.search(r"on (\d+) ranks", text)[1])
    assert numbers(train, micro, accumulation).batch(world).train == train


def test_a_triangle_that_no_world_can_make_right_is_refused_when_it_is_read():
    with pytest.raises(BatchError, match="7 is no multiple of 4"):
        numbers(7, 2, 2)
