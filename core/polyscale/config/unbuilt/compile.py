"""``compile``: DeepCompile."""

from polyscale.config.unbuilt.table import not_built

SECTION = not_built(
    "Passes of DeepCompile.",
    {
        "deepcompile": False,
        "free_activation": False,
        "free_activation_threshold": 10 * 1024 * 1024,
        "offload_activation": False,
        "offload_activation_pin_memory": True,
        "offload_opt_states": False,
        "double_buffer": True,
        "symmetric_memory": False,
        "debug_log": False,
        "offload_parameters": False,
        "sync_before_reduce": False,
        "sync_after_reduce": False,
        "sync_before_allgather": False,
        "sync_after_allgather": False,
        "keep_int_input_tensors": True,
        "keep_all_input_tensors": False,
        "passes": None,
        "autoep_non_moe": False,
    },
    nearest="torch.compile on the blocks of the model",
    off=("deepcompile", (False, None)),
)
