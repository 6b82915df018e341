"""``torch_autocast``: torch.autocast around the forward."""

from polyscale.config.unbuilt.table import not_built

SECTION = not_built(
    "Run the forward under torch.autocast.",
    {"enabled": False, "dtype": None, "lower_precision_safe_modules": None},
    nearest="bf16.enabled, with data_types.keep_in_fp32_modules for what must stay fp32",
)
