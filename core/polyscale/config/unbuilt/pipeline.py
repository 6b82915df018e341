"""``pipeline``: stages of a model that is split by layers."""

from polyscale.config.unbuilt.table import not_built

SECTION = not_built(
    "Split the model by layers.",
    {
        "stages": "auto",
        "partition": "best",
        "seed_layers": False,
        "activation_checkpoint_interval": 0,
        "pipe_partitioned": True,
        "grad_partitioned": True,
        "use_reentrant": None,
    },
    nearest="stage 3, which shards the layers' parameters over all devices",
)
