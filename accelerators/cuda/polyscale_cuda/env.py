"""The only file of this package that reads the environment."""

from __future__ import annotations

import os

MASK = "CUDA_VISIBLE_DEVICES"


def mask() -> str | None:
    """Value of ``CUDA_VISIBLE_DEVICES``; None when it is not set."""
    return os.environ.get(MASK)


def toolkit() -> str | None:
    """Root of the CUDA toolkit, by the two usual names."""
    return os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or None
