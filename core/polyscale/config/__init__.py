"""The configuration: DeepSpeed's vocabulary, every key known with a status, every value with an origin.

Notable: reading a configuration imports no torch; ``explain``, ``check`` and ``init`` of the command line are modules
of their own.
"""

from __future__ import annotations

from polyscale.config.batch import Batch
from polyscale.config.config import Config
from polyscale.config.load import load_config
from polyscale.config.origin import Note, Origin
from polyscale.config.sections.optimizer import OptimizerGroupSection, OptimizerSection, SchedulerSection

__all__ = [
    "Batch",
    "Config",
    "Note",
    "OptimizerGroupSection",
    "OptimizerSection",
    "Origin",
    "SchedulerSection",
    "load_config",
]
