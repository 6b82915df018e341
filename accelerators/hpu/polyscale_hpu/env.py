"""The only file of this package that reads the environment."""

from __future__ import annotations

import os

MASK = "HABANA_VISIBLE_MODULES"


def mask() -> str | None:
    """Value of ``HABANA_VISIBLE_MODULES``; None when it is not set."""
    return os.environ.get(MASK)
