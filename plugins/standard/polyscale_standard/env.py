"""The only file of this member that reads the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping


def inherited() -> Mapping[str, str]:
    """The environment that launched ranks inherit."""
    return os.environ
