"""``autotuning``: search for the fastest batch and stage."""

from polyscale.config.unbuilt.table import not_built

SECTION = not_built(
    "Search for the fastest configuration.",
    {
        "enabled": False,
        "fast": True,
        "results_dir": "autotuning_results",
        "exps_dir": "autotuning_exps",
        "overwrite": True,
        "start_profile_step": 3,
        "end_profile_step": 5,
        "metric": "throughput",
        "metric_path": None,
        "tuner_type": "gridsearch",
        "tuner_early_stopping": 5,
        "tuner_num_trials": 50,
        "arg_mappings": None,
        "model_info": {"profile": False, "num_params": None, "hidden_size": None, "num_layers": None},
        "model_info_path": None,
        "mp_size": 1,
        "max_train_batch_size": None,
        "min_train_batch_size": 1,
        "max_train_micro_batch_size_per_gpu": 1024,
        "min_train_micro_batch_size_per_gpu": 1,
        "num_tuning_micro_batch_sizes": 3,
    },
    nearest="trying zero_optimization.stage and train_micro_batch_size_per_gpu by hand, with wall_clock_breakdown on",
)
