"""``weight_quantization``: quantized weights for inference with stage 3."""

from polyscale.config.unbuilt.table import FREE, not_built

SECTION = not_built(
    "Quantize weights for inference.",
    {
        "enabled": True,
        "num_bits": 8,
        "q_type": "symmetric",
        "q_groups": 1,
        "quantized_initialization": FREE,
        "post_init_quant": FREE,
    },
    nearest="bf16.enabled",
)
