"""Keys that have no effect here, that need a plugin, that are not built; and what may differ between ranks."""

import copy
import json
import pickle
import subprocess
import sys

import pytest

from polyscale.config import load_config
from polyscale.config.errors import NotBuiltError, SeveralConfigErrors, UnknownKeyError


def test_a_set_key_without_effect_is_noted_with_the_reason_once():
    zero = {"stage": 2, "contiguous_gradients": True, "leaf_module": {"names": ["a"]}}
    aio = {"thread_count": 4, "block_size": 1}
    config = load_config({"zero_optimization": zero, "aio": aio, "memory_breakdown": True})
    keys = [note.key for note in config.no_effect]
    assert sorted(keys) == sorted(set(keys)) == [
        "aio", "memory_breakdown", "zero_optimization.contiguous_gradients", "zero_optimization.leaf_module",
    ]  # fmt: skip
    assert all(len(note.reason) > 10 for note in config.no_effect)
    left = config.notes(frozenset({"zero_optimization.contiguous_gradients", "aio"}))
    assert {note.key for note in left} == {"memory_breakdown", "zero_optimization.leaf_module"}
    assert load_config({}).no_effect == []


OFFLOAD = {
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "nvme"}}
}


def test_a_key_that_needs_a_plugin_is_refused_unless_a_chosen_one_honours_it():
    config = load_config(OFFLOAD)
    both = frozenset({"zero_optimization.offload_optimizer", "zero_optimization.offload_param"})
    config.require(both)
    config.require(frozenset({"zero_optimization"}))
    with pytest.raises(NotBuiltError, match=r"^zero_optimization\.offload_param: .*nearest that works: \"stage\": 3"):
        config.require(both - {"zero_optimization.offload_param"})
    with pytest.raises(SeveralConfigErrors, match="offload_optimizer"):
        config.require(frozenset({"zero_optimization.offload_par"}))
    assert config.zero_optimization.offload_param.device == "nvme"


@pytest.mark.parametrize(
    "zero",
    [{"offload_optimizer": {"device": "none", "pin_memory": True}}, {"offload_param": {}}, {"zenflow": None},
     {"zero_hpz_partition_size": 1}, {"zero_quantized_weights": False}, {"cpu_offload": False}, {"mics_shard_size": -1},
     {"stage": 2, "legacy_stage1": False}],
)  # fmt: skip
def test_a_key_that_asks_for_nothing_is_accepted(zero):
    load_config({"zero_optimization": zero}).require(frozenset())


@pytest.mark.parametrize(
    ("config", "path"),
    [
        ({"autotuning": {"enabled": True}}, "autotuning"),
        ({"elasticity": {"enabled": True, "micro_batch_sizes": [1]}}, "elasticity"),
        ({"flops_profiler": {"enabled": True}}, "flops_profiler"),
        ({"pipeline": {"stages": 2}}, "pipeline"),
        ({"tensor_parallel": {"autotp_size": 2}}, "tensor_parallel"),
        ({"sparse_attention": {"mode": "bigbird"}}, "sparse_attention"),
        ({"compression_training": {"row_pruning": {"shared_parameters": {"enabled": True}}}}, "compression_training"),
        ({"datastates_ckpt": {"anything": 1}}, "datastates_ckpt"),
        ({"amp": {"enabled": True, "opt_level": "O1"}}, "amp"),
        ({"gradient_allreduce_op": "sum"}, "gradient_allreduce_op = 'sum'"),
        ({"managed_gradient_accumulation": False}, "managed_gradient_accumulation = False"),
        ({"sequence_parallel_size": 2}, "sequence_parallel_size = 2"),
        (
            {"fp16": {"enabled": True, "fp16_master_weights_and_grads": True}},
            "fp16.fp16_master_weights_and_grads = True",
        ),
        ({"zero_optimization": {"legacy_stage1": True}}, "zero_optimization.legacy_stage1 = True"),
        ({"checkpoint": {"use_node_local_storage": True}}, "checkpoint.use_node_local_storage = True"),
    ],
)
def test_what_is_not_built_is_an_error_that_names_the_key_and_the_nearest_that_works(config, path):
    with pytest.raises(NotBuiltError, match=r"the nearest that works: .+") as error:
        load_config(config)
    assert error.value.given == path


@pytest.mark.parametrize(
    "config",
    [
        {"autotuning": {"enabled": False, "fast": False, "arg_mappings": {"a": "b"}}},
        {"elasticity": {"enabled": False, "micro_batch_sizes": [1]}},
        {"pipeline": {"stages": "auto"}},
        {"tensor_parallel": {"autotp_size": 1}},
        {"weight_quantization": {"enabled": False, "num_bits": 4}},
        {"compression_training": {"row_pruning": {"shared_parameters": {"enabled": False, "method": "topk"}}}},
        {"datastates_ckpt": False},
        {"curriculum_learning": {"enabled": False, "schedule_config": {"free": 1}}},
        {"wandb": {"enabled": False, "project": "mine"}},
        {"compile": {"deepcompile": False}},
        {"nebula": None},
    ],
)
def test_a_section_that_is_off_is_accepted(config):
    load_config(config).require(frozenset())


def test_a_monitor_needs_an_observer_that_honours_it():
    config = load_config({"wandb": {"enabled": True}})
    with pytest.raises(NotBuiltError, match=r"wandb.*tensorboard"):
        config.require(frozenset())
    config.require(frozenset({"wandb"}))


def test_options_for_a_plugin_that_does_not_exist_are_refused_with_the_nearest():
    config = load_config({"backends": {"options": {"fsdp": {"blocks": ["Block"]}}}})
    config.require(frozenset())
    with pytest.raises(UnknownKeyError, match=r"backends\.options\.fsdp: .*Did you mean 'fsdp2'"):
        config.require(frozenset(), plugins=frozenset({"ddp", "fsdp2"}))


def test_the_digest_is_the_same_in_another_process_and_does_not_depend_on_the_order_of_keys():
    first = {"seed": 1, "zero_optimization": {"stage": 2, "reduce_bucket_size": 5e8}, "optimizer": {"type": "SGD"}}
    turned = {
        "optimizer": {"type": "SGD"},
        "zero_optimization": {"reduce_bucket_size": 500000000, "stage": 2},
        "seed": 1,
    }
    digest = load_config(first).digest()
    assert load_config(turned).digest() == digest
    script = f"from polyscale.config import load_config; print(load_config({json.dumps(turned)!r}).digest())"
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, env={"PYTHONHASHSEED": seed}
        )
        assert done.stdout.strip() == digest, done.stderr


def test_what_differs_between_two_ranks_is_listed_and_what_only_prints_may_differ():
    mine = load_config({"seed": 1, "gradient_clipping": 1.0, "steps_per_print": 5, "optimizer": {"type": "SGD"}})
    other = load_config({"seed": 2, "gradient_clipping": 1.0, "tensorboard": {"enabled": True}})
    sent = json.loads(json.dumps(other.as_dict()))
    assert mine.differences(sent) == [
        ("optimizer", None, None), ("optimizer.groups", [], None), ("optimizer.legacy_fusion", False, None),
        ("optimizer.params", {}, None), ("optimizer.skip_decay_for_norms_and_biases", False, None),
        ("optimizer.type", "SGD", None), ("seed", 1, 2),
    ][1:]  # fmt: skip
    assert mine.digest() != other.digest()
    quiet = load_config({"seed": 2, "gradient_clipping": 1.0})
    assert (quiet.differences(sent), quiet.digest()) == ([], other.digest())


def test_a_configuration_survives_its_own_dict_and_cannot_be_changed():
    config = load_config({"optimizer": {"type": "SGD", "params": {"lr": 1}}, "steps_per_print": float("inf"),
                          "flops_profiler": {"enabled": False, "profile_step": 3}})  # fmt: skip
    values = config.as_dict()
    assert load_config(json.loads(json.dumps(values))).as_dict() == values
    assert values["flops_profiler"] == {"enabled": False, "profile_step": 3}
    with pytest.raises(Exception, match="frozen"):
        config.seed = 3
    for copied in (copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert (copied.digest(), copied.origins) == (config.digest(), config.origins)
