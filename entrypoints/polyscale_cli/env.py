"""The only file of this member that reads the environment."""

from __future__ import annotations

import os
from pathlib import Path

DEBUG = "POLYSCALE_DEBUG"


def debug() -> bool:
    """Whether unexpected errors show their traceback (``POLYSCALE_DEBUG``)."""
    return os.environ.get(DEBUG, "0") not in ("", "0")


def state_folder() -> Path:
    """Where this user's own records are kept: ``$XDG_STATE_HOME/polyscale``, else ``~/.local/state/polyscale``."""
    base = os.environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "polyscale"


def without_autoload() -> dict[str, str]:
    """The environment of a process in which torch loads no out-of-tree backend by itself."""
    return {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}


def compiler_names() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Candidates for the C and the C++ compiler, the user's own (``CC``, ``CXX``) first."""
    c = (os.environ.get("CC", ""), "cc", "gcc", "clang")
    cpp = (os.environ.get("CXX", ""), "c++", "g++", "clang++")
    return tuple(filter(None, c)), tuple(filter(None, cpp))
