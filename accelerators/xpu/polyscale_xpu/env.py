"""The only file of this package that reads the environment."""

from __future__ import annotations

import os

MASK = "ZE_AFFINITY_MASK"


def mask() -> str | None:
    """Value of ``ZE_AFFINITY_MASK``; None when it is not set."""
    return os.environ.get(MASK)


def compiler_roots() -> list[str]:
    """Roots of the oneAPI compiler that its setup scripts name, best first."""
    roots = [os.environ.get("CMPLR_ROOT", "")]
    if oneapi := os.environ.get("ONEAPI_ROOT"):
        roots.append(f"{oneapi}/compiler/latest")
    return [root for root in roots if root]
