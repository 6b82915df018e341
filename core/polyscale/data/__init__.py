"""Data: micro-batches that are the same samples whatever the number of ranks, and that can be resumed.

``polyscale.data.loader(dataset, ...)`` makes a :class:`Loader`; the rest is torch's ``DataLoader`` underneath.
"""

from __future__ import annotations

from polyscale.data.order import Order
from polyscale.data.sampled import Loader, loader

__all__ = ["Loader", "Order", "loader"]
