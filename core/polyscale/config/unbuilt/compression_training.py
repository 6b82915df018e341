"""``compression_training``: quantization, pruning and layer reduction while training."""

from collections.abc import Mapping
from typing import Any

from polyscale.config.unbuilt.table import ANY_NAME, FREE, not_built


def _technique(shared: Mapping[str, Any], group: Mapping[str, Any]) -> dict[str, Any]:
    one = {"params": dict(group), "modules": ["*"], "related_modules": None}
    return {"shared_parameters": {"enabled": False, **shared}, "different_groups": {ANY_NAME: one}}


_PRUNING = {"method": "l1", "schedule_offset": 1000}

SECTION = not_built(
    "Compress the model while it trains.",
    {
        "weight_quantization": _technique(
            {
                "quantizer_kernel": False,
                "schedule_offset": 0,
                "quantize_groups": 1,
                "quantize_verbose": False,
                "quantization_type": "symmetric",
                "rounding": "nearest",
                "quantize_weight_in_forward": False,
                "fp16_mixed_quantize": {"enabled": False, "quantize_change_ratio": 0.001},
            },
            {"start_bits": None, "target_bits": None, "quantization_period": 1},
        ),
        "activation_quantization": _technique(
            {"quantization_type": "symmetric", "range_calibration": "dynamic", "schedule_offset": 1000}, {"bits": None}
        ),
        "sparse_pruning": _technique(
            {
                **_PRUNING,
                "block_pattern": "4x1",
                "dense_ratio": 0.1,
                "schedule_offset_stride": 1,
                "schedule_offset_end": None,
                "excluded_modules": FREE,
            },
            {"dense_ratio": None},
        ),
        "row_pruning": _technique(_PRUNING, {"dense_ratio": None}),
        "channel_pruning": _technique(_PRUNING, {"dense_ratio": None}),
        "head_pruning": _technique(
            {"method": "topk", "schedule_offset": 1000, "num_heads": None}, {"dense_ratio": None}
        ),
        "layer_reduction": {
            "enabled": False,
            "keep_number_layer": None,
            "module_name_prefix": None,
            "teacher_layer": None,
            "other_module_name": None,
        },
    },
    nearest="torch.ao and torchao on the model before it is given to polyscale.initialize",
)
