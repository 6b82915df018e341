"""The only file of this package that reads the environment."""

from __future__ import annotations

import os

MASK = "ASCEND_RT_VISIBLE_DEVICES"


def mask() -> str | None:
    """Value of ``ASCEND_RT_VISIBLE_DEVICES``; None when it is not set."""
    return os.environ.get(MASK)


def toolkit() -> str | None:
    """Root of CANN, as its ``set_env.sh`` names it."""
    return os.environ.get("ASCEND_HOME_PATH") or os.environ.get("ASCEND_TOOLKIT_HOME") or None
