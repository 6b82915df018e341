"""``flops_profiler``: floating-point operations by module."""

from polyscale.config.unbuilt.table import not_built

SECTION = not_built(
    "Count floating-point operations.",
    {
        "enabled": False,
        "recompute_fwd_factor": 0.0,
        "profile_step": 1,
        "module_depth": -1,
        "top_modules": 1,
        "detailed": True,
        "output_file": None,
    },
    nearest="torch.utils.flop_counter.FlopCounterMode around a step, and wall_clock_breakdown",
)
