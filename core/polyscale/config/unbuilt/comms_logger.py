"""``comms_logger``: sizes and times of collectives."""

from polyscale.config.unbuilt.table import not_built

SECTION = not_built(
    "Log collectives.",
    {"enabled": False, "prof_all": True, "prof_ops": [], "verbose": False, "debug": False},
    nearest="torch.profiler around a step, or TORCH_DISTRIBUTED_DEBUG=DETAIL",
)
