"""The hook specs: one per kind of plugin. This file is the manual of what a plugin may provide.

A plugin is a class with ``interface_version = (major, minor)`` and one method marked ``@hookimpl``. The method is given
a :class:`PluginContext` and hands over an object that implements the Protocol of its kind (``polyscale.interfaces``).
Hooks hand over objects and do nothing else: the objects do the work, so no hook is called per step or per parameter.

The class is named by an entry point of the group of its kind (``polyscale.accelerator``, ``polyscale.optimizer``, ...);
the entry point's name is the name users select. Listing plugins imports none of them; only the chosen one is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from polyscale.config import Config
    from polyscale.interfaces.accelerator import Accelerator
    from polyscale.interfaces.checkpoint import CheckpointStorage
    from polyscale.interfaces.communication import Communication
    from polyscale.interfaces.io import FileIO
    from polyscale.interfaces.launcher import Launcher
    from polyscale.interfaces.observer import Observer
    from polyscale.interfaces.op import OpLibrary
    from polyscale.interfaces.optimizer import OptimizerFactory
    from polyscale.interfaces.parallelism import Parallelism
    from polyscale.interfaces.precision import Precision

PROJECT = "polyscale"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@dataclass(frozen=True)
class PluginContext:
    """What a hook may look at when it makes its object.

    Attributes:
        name: the name the plugin was selected by (its entry point).
        options: the plugin's own options, ``backends.options.<name>`` of the configuration.
        config: the resolved configuration; None when the report only asks what is installed.
        accelerator: the chosen accelerator; None while the accelerator itself is being made.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    config: Config | None = None
    accelerator: Accelerator | None = None


class HookSpecs:
    """Every hook of polyscale. A plugin implements the one of its kind."""

    @hookspec
    def polyscale_accelerator(self, context: PluginContext) -> Accelerator:  # type: ignore[empty-body]
        """Hand over a device type: its devices, memory, random numbers, streams (group ``polyscale.accelerator``)."""

    @hookspec
    def polyscale_communication(self, context: PluginContext) -> Communication:  # type: ignore[empty-body]
        """Hand over collectives between ranks over one backend (group ``polyscale.communication``)."""

    @hookspec
    def polyscale_optimizer(self, context: PluginContext) -> OptimizerFactory:  # type: ignore[empty-body]
        """Hand over a factory of one optimizer and the granularity it needs (group ``polyscale.optimizer``)."""

    @hookspec
    def polyscale_precision(self, context: PluginContext) -> Precision:  # type: ignore[empty-body]
        """Hand over the dtypes of compute, master, reduction and accumulation (group ``polyscale.precision``)."""

    @hookspec
    def polyscale_parallelism(self, context: PluginContext) -> Parallelism:  # type: ignore[empty-body]
        """Hand over a way to spread a model over ranks (group ``polyscale.parallelism``)."""

    @hookspec
    def polyscale_io(self, context: PluginContext) -> FileIO:  # type: ignore[empty-body]
        """Hand over a mover of bytes between tensors and files (group ``polyscale.io``)."""

    @hookspec
    def polyscale_op(self, context: PluginContext) -> OpLibrary:  # type: ignore[empty-body]
        """Hand over operators with their reference and their kernels per device type (group ``polyscale.op``)."""

    @hookspec
    def polyscale_checkpoint(self, context: PluginContext) -> CheckpointStorage:  # type: ignore[empty-body]
        """Hand over a storage of logical tensors by name (group ``polyscale.checkpoint``)."""

    @hookspec
    def polyscale_launcher(self, context: PluginContext) -> Launcher:  # type: ignore[empty-body]
        """Hand over a starter of ranks on hosts (group ``polyscale.launcher``)."""

    @hookspec
    def polyscale_observer(self, context: PluginContext) -> Observer:  # type: ignore[empty-body]
        """Hand over a receiver of events: metrics, logs (group ``polyscale.observer``). Every observer is called."""
