"""``progressive_layer_drop``: skip layers at random while training."""

from polyscale.config.unbuilt.table import not_built

SECTION = not_built(
    "Skip layers at random.",
    {"enabled": False, "theta": 1.0, "gamma": 0.001},
    nearest="stochastic depth in the model itself",
)
