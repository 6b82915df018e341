"""``eigenvalue``: curvature for quantization-aware training, at the top level."""

from polyscale.config.unbuilt.quantize_training import EIGENVALUE
from polyscale.config.unbuilt.table import not_built

SECTION = not_built("Largest eigenvalues by layer.", EIGENVALUE, nearest="training without it")
