"""``elasticity``: batch sizes that fit many worlds."""

from polyscale.config.unbuilt.table import not_built

SECTION = not_built(
    "Choose batch sizes that fit several numbers of devices.",
    {
        "enabled": False,
        "max_train_batch_size": 2000,
        "micro_batch_sizes": [2, 4, 6],
        "min_gpus": 1,
        "max_gpus": 10000,
        "num_gpus_per_node": 1,
        "model_parallel_size": 1,
        "min_time": 0,
        "prefer_larger_batch": True,
        "ignore_non_elastic_batch_info": False,
        "version": 0.2,
    },
    nearest="train_batch_size alone with gradient_accumulation_steps left out; checkpoints load at any world size",
)
