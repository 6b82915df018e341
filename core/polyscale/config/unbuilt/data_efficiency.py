"""``data_efficiency``: curriculum sampling, dynamic batches, random layer-token dropping."""

from polyscale.config.unbuilt.table import ANY_NAME, FREE, not_built

_METRIC = {
    "index_to_sample_path": None,
    "index_to_metric_path": None,
    "difficulty_type": None,
    "clustering_type": None,
    "min_difficulty": None,
    "max_difficulty": None,
    "schedule_type": None,
    "schedule_config": FREE,
}
_SAMPLING = {
    "enabled": False,
    "num_epochs": 1000,
    "num_workers": 0,
    "pin_memory": False,
    "curriculum_learning": {"enabled": False, "data_cluster_path": None, "curriculum_metrics": {ANY_NAME: _METRIC}},
    "dynamic_batching": {
        "enabled": False,
        "metrics_path": None,
        "lr_scaling_method": "linear",
        "min_batch_size": 1,
        "max_batch_size": None,
        "sequence_picking_order": "dataloader",
        "max_tokens": None,
        "verbose": False,
    },
}
_LTD = {
    "enabled": False,
    "total_layer_num": None,
    "random_ltd_layer_num": None,
    "random_ltd_layer_id": None,
    "model_mask_name": None,
    "model_type": None,
    "hidden_state_order": None,
    "micro_batch_size": None,
    "global_batch_size": None,
    "random_ltd_schedule": {
        "min_value": None,
        "max_value": None,
        "schedule_type": "fixed_linear",
        "schedule_config": {"require_steps": None, "seq_per_step": None},
    },
    "layer_token_lr_schedule": {
        "enabled": False,
        "total_layer_tokens": None,
        "warmup_type": None,
        "warmup_layer_tokens": None,
    },
}

SECTION = not_built(
    "Sample and route data for faster training.",
    {
        "enabled": False,
        "seed": 1234,
        "data_sampling": _SAMPLING,
        "data_routing": {"enabled": False, "random_ltd": _LTD},
    },
    nearest="a dataset that is ordered by difficulty, given to polyscale.data.loader",
)
