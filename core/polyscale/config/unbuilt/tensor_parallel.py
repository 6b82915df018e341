"""``tensor_parallel``: layers spread over ranks."""

from polyscale.config.unbuilt.table import ANY_NAME, FREE, not_built

_SIZE = {"tp_size": 1, "tp_grain_size": 1, "mpu": None, "tp_group": None}
_LAYER = {
    "patterns": FREE,
    "partition_type": "column",
    "shape": FREE,
    "partition_dim": None,
    "model_types": FREE,
    "gather_output": False,
    "grad_allreduce": True,
}

SECTION = not_built(
    "Spread layers over ranks.",
    {
        "dtype": "fp16",
        "autotp_size": 0,
        "tp_overlap_comm": False,
        "tensor_parallel": _SIZE,
        "tp": _SIZE,
        "injection_policy_tuple": FREE,
        "partition_config": {
            "layer_specs": {ANY_NAME: _LAYER},
            "use_default_specs": True,
            "strict_mode": False,
            "tp_size": 1,
            "embedding_partition_dim": 1,
            "lm_head_patterns": ["lm_head", "embed_out"],
        },
        "preset_model": None,
        "keep_module_on_host": False,
        "replace_with_kernel_inject": False,
        "kernel_inject": False,
        "vocab_parallel_lm_head": None,
        "vocab_parallel_ce_backend": "torch",
    },
    nearest="stage 3, which shards the layers' parameters over all devices",
    off=("autotp_size", (0, 1, None)),
)
