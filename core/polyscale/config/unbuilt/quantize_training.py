"""``quantize_training``: quantization-aware training (MoQ)."""

from polyscale.config.unbuilt.table import FREE, not_built

EIGENVALUE = {
    "enabled": False,
    "verbose": False,
    "max_iter": 100,
    "tol": 1e-2,
    "stability": 1e-6,
    "gas_boundary_resolution": 1,
    "layer_name": "bert.encoder.layer",
    "layer_num": 0,
}

SECTION = not_built(
    "Quantize while training.",
    {
        "enabled": False,
        "eigenvalue": EIGENVALUE,
        "quantize_weight_in_forward": False,
        "quantize_verbose": False,
        "quantizer_kernel": False,
        "quantize_groups": 1,
        "quantize_bits": FREE,
        "quantize_schedule": FREE,
        "quantize_algo": FREE,
        "fp16_mixed_quantize": FREE,
    },
    nearest="torchao on the model before it is given to polyscale.initialize",
)
