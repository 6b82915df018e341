"""The only file of this package that reads the environment."""

from __future__ import annotations

import os


def compiler() -> str | None:
    """The C++ compiler named by ``CXX``."""
    return os.environ.get("CXX") or None
