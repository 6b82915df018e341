"""The configuration: DeepSpeed's vocabulary, every key known with a status, every value with an origin.

Notable: reading a configuration imports no torch, and a plugin that only checks its arguments with what is here imports
no pydantic: names are loaded when first used. ``explain``, ``check`` and ``init`` of the command line are modules of
their own.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

_LAZY = {
    "Batch": "polyscale.config.batch",
    "Config": "polyscale.config.config",
    "Note": "polyscale.config.origin",
    "OptimizerGroupSection": "polyscale.config.sections.optimizer",
    "OptimizerSection": "polyscale.config.sections.optimizer",
    "Origin": "polyscale.config.origin",
    "SchedulerSection": "polyscale.config.sections.optimizer",
    "load_config": "polyscale.config.load",
}

__all__ = sorted(_LAZY)

if TYPE_CHECKING:
    from polyscale.config.batch import Batch as Batch
    from polyscale.config.config import Config as Config
    from polyscale.config.load import load_config as load_config
    from polyscale.config.origin import Note as Note
    from polyscale.config.origin import Origin as Origin
    from polyscale.config.sections.optimizer import OptimizerGroupSection as OptimizerGroupSection
    from polyscale.config.sections.optimizer import OptimizerSection as OptimizerSection
    from polyscale.config.sections.optimizer import SchedulerSection as SchedulerSection


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'polyscale.config' has no attribute {name!r}")
    value = getattr(import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
