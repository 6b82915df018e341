"""``"auto"`` is resolved, with the way it was found as origin, or listed; never dropped."""

import pytest

from polyscale.config import load_config
from polyscale.config.errors import UnresolvedAutoError

# What a Hugging Face user writes; the Trainer fills it in before an engine sees it.
HUGGING_FACE = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "fp16": {"enabled": "auto"},
    "bf16": {"enabled": "auto"},
    "zero_optimization": {
        "stage": 3,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "overlap_comm": "auto",
    },
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto", "total_num_steps": "auto",
        },
    },
}  # fmt: skip
FILLED = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_clipping": 1.0,
    "optimizer.params.lr": 1e-3,
    "optimizer.params.betas": [0.9, 0.99],
    "optimizer.params.eps": 1e-8,
    "optimizer.params.weight_decay": 0.0,
    "scheduler.params.warmup_max_lr": 1e-3,
    "scheduler.params.warmup_num_steps": 10,
    "scheduler.params.total_num_steps": 100,
}


def test_all_that_nothing_can_tell_is_listed_in_one_error():
    with pytest.raises(UnresolvedAutoError) as error:
        load_config(HUGGING_FACE)
    listed = {part.split(" = ")[0] for part in error.value.given.split(", ")}
    assert listed == {"train_batch_size", "gradient_accumulation_steps", *FILLED}
    assert "gradient_clipping: 1.0 (DeepSpeed's default) or 0 (off)" in error.value.fix


def test_values_given_for_auto_are_used_and_the_rest_is_resolved_with_a_reason():
    config = load_config(HUGGING_FACE, auto={**FILLED, "train_batch_size": 16, "gradient_accumulation_steps": 2})
    assert config.optimizer.params == {"lr": 1e-3, "betas": [0.9, 0.99], "eps": 1e-8, "weight_decay": 0.0}
    assert config.scheduler.params["warmup_min_lr"] == 0.0
    assert (config.fp16.enabled, config.bf16.enabled, config.batch(2).train) == (False, False, 16)
    origins = config.origins
    assert (origins["optimizer.params.lr"].kind, origins["optimizer.params.lr"].detail) == ("argument", "auto=")
    assert origins["scheduler.params.warmup_min_lr"].kind == "auto"
    assert "no effect" in origins["zero_optimization.overlap_comm"].detail
    assert config.zero_optimization.reduce_bucket_size == "auto"  # for the plugin that honours it


def test_batch_numbers_come_by_arithmetic_when_one_is_known():
    config = load_config(
        {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": "auto"}
    )
    assert config.batch(2).accumulation == 4
    assert config.origins["gradient_accumulation_steps"].kind == "auto"
    assert "arithmetic" in config.origins["gradient_accumulation_steps"].detail
    with pytest.raises(UnresolvedAutoError, match="train_batch_size"):
        load_config({"train_batch_size": "auto", "gradient_accumulation_steps": 2})


def test_precision_switches_and_warmup_follow_from_what_is_written():
    config = load_config({"fp16": {"enabled": "auto"}, "bf16": {"enabled": "auto"}, "backends": {"precision": "bf16"}})
    assert (config.precision, config.origins["bf16.enabled"].detail) == ("bf16", "backends.precision is bf16")
    config = load_config(
        {
            "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "auto"}},
        }
    )
    assert config.scheduler.params["warmup_max_lr"] == 0.5
    assert config.origins["scheduler.params.warmup_max_lr"].detail == "optimizer.params.lr"


def test_a_learning_rate_that_is_text_resolves_the_warmup():
    config = load_config(
        {
            "optimizer": {"type": "SGD", "params": {"lr": "5e-1"}},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "auto"}},
        }
    )
    assert config.scheduler.params["warmup_max_lr"] == 0.5


def test_auto_that_is_a_value_of_its_key_stays():
    backends = {"accelerator": "auto", "options": {"fsdp2": {"blocks": "auto"}}}
    data_types = {"keep_in_fp32_modules": "auto"}
    config = load_config({"backends": backends, "data_types": data_types, "topology": {"dp_shard": "auto"}})
    assert config.backends.options == {"fsdp2": {"blocks": "auto"}}
    assert (config.backends.accelerator, config.data_types.keep_in_fp32_modules) == ("auto", "auto")
    assert config.topology.dp_shard == -1


@pytest.mark.parametrize(
    ("config", "path"),
    [
        ({"zero_optimization": {"stage": "auto"}}, "zero_optimization.stage"),
        ({"optimizer": {"type": "auto"}}, "optimizer.type"),
        ({"optimizer": {"type": "SGD", "groups": [{"match": ["*"], "params": {"lr": "auto"}}]}},
         "optimizer.groups[0].params.lr"),
        ({"optimizer": {"type": "SGD", "params": {"betas": [0.9, "auto"]}}}, "optimizer.params.betas[1]"),
        ({"seed": "auto"}, "seed"),
        ({"tensorboard": {"output_path": "auto"}}, "tensorboard.output_path"),
        ({"zero_optimization": {"offload_param": {"device": "auto"}}}, "zero_optimization.offload_param.device"),
    ],
)  # fmt: skip
def test_auto_elsewhere_is_an_error_that_names_the_key(config, path):
    with pytest.raises(UnresolvedAutoError) as error:
        load_config(config)
    assert error.value.given == f'{path} = "auto"'
