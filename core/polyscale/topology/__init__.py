"""Which ranks work together: sizes of the axes, the views of one world, and the process groups behind them."""

from polyscale.topology.sizes import DENSE_AXES, EXPERT_AXES, resolve_sizes
from polyscale.topology.views import Purpose, Topology

__all__ = ["DENSE_AXES", "EXPERT_AXES", "Purpose", "Topology", "resolve_sizes"]
