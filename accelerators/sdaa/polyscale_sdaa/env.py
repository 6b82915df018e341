"""The only file of this package that reads the environment."""

from __future__ import annotations

import os

MASK = "SDAA_VISIBLE_DEVICES"


def mask() -> str | None:
    """Value of ``SDAA_VISIBLE_DEVICES``; None when it is not set."""
    return os.environ.get(MASK)
