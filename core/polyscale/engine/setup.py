"""What an engine is made of: everything that ``initialize`` chose and built, and how it is taken apart."""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from polyscale.control.agreement import Control
from polyscale.control.watchdog import Watchdog
from polyscale.discovery import select
from polyscale.engine.observing import Observers
from polyscale.engine.runtime import Runtime, plugin_context
from polyscale.interfaces.accelerator import Accelerator
from polyscale.interfaces.checkpoint import CheckpointStorage
from polyscale.interfaces.communication import Communication
from polyscale.interfaces.io import FileIO
from polyscale.interfaces.parallelism import DataParallelApplied
from polyscale.interfaces.precision import LossScaler
from polyscale.topology import Topology

if TYPE_CHECKING:
    from polyscale.config import Batch, Config

log = logging.getLogger("polyscale")


@dataclass
class Setup:
    """The parts of an engine."""

    model: nn.Module
    runtime: Runtime
    batch: Batch
    topology: Topology
    applied: DataParallelApplied
    optimizer: torch.optim.Optimizer | None
    lr_scheduler: Any
    scaler: LossScaler | None
    check_overflow: bool
    dtypes: dict[str, str]
    observers: Observers
    data: Any = None
    owns_topology: bool = True
    _made: dict[str, Any] = field(default_factory=dict)

    @property
    def config(self) -> Config:
        """The resolved configuration."""
        return self.runtime.config

    @property
    def accelerator(self) -> Accelerator:
        """The chosen accelerator."""
        return self.runtime.accelerator

    @property
    def communication(self) -> Communication:
        """The chosen communication backend."""
        return self.runtime.communication

    @property
    def control(self) -> Control:
        """Agreement between ranks."""
        return self.runtime.control

    @property
    def watchdog(self) -> Watchdog:
        """Sees failing ranks."""
        return self.runtime.watchdog

    @property
    def device(self) -> torch.device:
        """This rank's device."""
        return self.runtime.device

    @property
    def data_parallel(self) -> str:
        """Name of the data-parallel plugin."""
        return self.runtime.parallelism.name

    def checkpoint_storage(self) -> CheckpointStorage:
        """The chosen checkpoint plugin, loaded when first used."""
        found: CheckpointStorage = self._plugin("checkpoint", self.config.backends.checkpoint, "dcp")
        return found

    def io(self) -> FileIO:
        """The chosen I/O plugin, loaded when first used."""
        found: FileIO = self._plugin("io", self.config.backends.io, "threads")
        return found

    def _plugin(self, kind: str, requested: str, default: str) -> Any:
        if kind not in self._made:
            name = default if requested == "auto" else requested
            context = plugin_context(name, self.config, self.accelerator)
            self._made[kind] = select(kind, requested, default=[default], context=context)
        return self._made[kind]

    def close(self) -> None:
        """Free everything, each part even when another one fails."""
        with contextlib.ExitStack() as stack:
            stack.callback(self.watchdog.stop)
            if self.owns_topology:
                stack.callback(self.topology.close)
            if "io" in self._made:
                stack.callback(self._made["io"].close)
            stack.callback(self.observers.close)
            stack.callback(self.applied.close)
