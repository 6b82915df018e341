"""The only file of this package that reads the environment."""

from __future__ import annotations

import os

HIP = "HIP_VISIBLE_DEVICES"
ROCR = "ROCR_VISIBLE_DEVICES"
CUDA = "CUDA_VISIBLE_DEVICES"


def masks() -> dict[str, str]:
    """The variables that mask devices and are set, the one that acts first foremost.

    ``ROCR_VISIBLE_DEVICES`` masks below HIP; HIP reads ``HIP_VISIBLE_DEVICES``, else ``CUDA_VISIBLE_DEVICES``, and
    counts within what is left (https://rocm.docs.amd.com/projects/HIP/en/latest/reference/env_variables.html).
    """
    found = {name: os.environ[name] for name in (ROCR, HIP, CUDA) if name in os.environ}
    if HIP in found:
        found.pop(CUDA, None)
    return found


def toolkit() -> str | None:
    """Root of ROCm, by the two usual names."""
    return os.environ.get("ROCM_HOME") or os.environ.get("ROCM_PATH") or None
