"""``nebula``: a hosted checkpoint service."""

from polyscale.config.unbuilt.table import not_built

SECTION = not_built(
    "Checkpoints to a hosted service.",
    {
        "enabled": False,
        "nebula_load_path": None,
        "enable_nebula_load": True,
        "persistent_storage_path": None,
        "persistent_time_interval": 100,
        "num_of_version_in_retention": 2,
    },
    nearest='backends.checkpoint: "dcp" into a folder',
)
