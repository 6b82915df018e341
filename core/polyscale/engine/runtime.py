"""What an engine runs on: the chosen plugins, this rank's device, and the process group with its watchdog."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from polyscale import env
from polyscale.control.agreement import Control
from polyscale.control.process_group import ensure_process_group
from polyscale.control.watchdog import Watchdog
from polyscale.discovery import installed, load, select, select_accelerator
from polyscale.errors import ConfigError
from polyscale.hooks import PluginContext
from polyscale.interfaces.accelerator import Accelerator
from polyscale.interfaces.communication import Communication
from polyscale.interfaces.parallelism import Parallelism
from polyscale.kinds import KINDS

if TYPE_CHECKING:
    from polyscale.config import Config

logger = logging.getLogger("polyscale")


@dataclass(frozen=True)
class Runtime:
    """The parts that do not depend on the model."""

    config: Config
    accelerator: Accelerator
    communication: Communication
    parallelism: Parallelism
    control: Control
    watchdog: Watchdog
    device: torch.device


def choose_accelerator(config: Config) -> Accelerator:
    """Select the accelerator; nothing is activated yet."""
    return select_accelerator(config.backends.accelerator, context=PluginContext("", config=config))


def start_runtime(config: Config, accelerator: Accelerator) -> Runtime:
    """Choose the other plugins, take this rank's device, join the other ranks. Collective.

    Raises:
        PolyscaleError: a plugin or a key of the configuration cannot be used, before anything is allocated.
    """
    parallelism = _data_parallelism(config, accelerator)
    config.require(parallelism.honours, plugins=_plugin_names())
    device = _activate(accelerator)
    communication = select(
        "communication",
        config.backends.communication,
        default=list(accelerator.communications),
        context=plugin_context(config.backends.communication, config, accelerator),
    )
    control = ensure_process_group(communication, accelerator)
    return Runtime(config, accelerator, communication, parallelism, control, Watchdog(control), device)


def plugin_context(name: str, config: Config, accelerator: Accelerator | None) -> PluginContext:
    """The context of the plugin ``name``, with its options."""
    return PluginContext(name, dict(config.backends.options.get(name, {})), config, accelerator)


def _data_parallelism(config: Config, accelerator: Accelerator) -> Parallelism:
    """Choose the one data-parallel plugin: by name, else ddp at stage 0, else zero where installed, else fsdp2."""
    stage = config.zero_optimization.stage
    name = config.backends.data_parallel
    if name == "auto":
        present = {entry.name for entry in installed("parallelism")}
        name = "ddp" if stage == 0 else "zero" if "zero" in present else "fsdp2"
    plugin: Parallelism = load("parallelism", name, plugin_context(name, config, accelerator))
    if plugin.role != "data":
        raise ConfigError(
            f"backends.data_parallel = {name!r}", why="it is a model-parallel plugin", fix="Write 'auto' or 'fsdp2'"
        )
    if stage not in plugin.stages:
        stages = ", ".join(map(str, plugin.stages))
        raise ConfigError(
            f"zero_optimization.stage = {stage} with backends.data_parallel = {name!r}",
            why=f"{name} implements stage {stages}",
            fix="Set backends.data_parallel to 'auto', or choose a stage it implements",
        )
    return plugin


def _plugin_names() -> frozenset[str]:
    """Names that ``backends.options`` may hold: those of every installed plugin."""
    return frozenset(entry.name for kind in KINDS for entry in installed(kind))


def _activate(accelerator: Accelerator) -> torch.device:
    """Make this rank's device the current one."""
    accelerator.activate()
    count = accelerator.device_count()
    local_rank = env.local_rank(env.launch().rank)
    said = shared_devices(env.launch().local_world_size, count, env.device_mask(accelerator.visible_devices_variable))
    if said and accelerator.device_type != "cpu" and local_rank == 0:
        logger.warning("accelerator %s: %s", accelerator.name, said)
    accelerator.set_device(local_rank % max(count, 1))
    return accelerator.device()


def shared_devices(ranks: int, devices: int, mask: str | None) -> str:
    """Say that ``ranks`` of one host share fewer ``devices``; "" where they do not.

    A launcher may show each rank one device of its own, by a mask: then one is as it should be.
    """
    if ranks <= max(devices, 1) or (devices == 1 and mask is not None):
        return ""
    fix = f"Start at most {devices} on this host, or unset the mask {mask!r}" if mask else f"Start at most {devices}"
    return (
        f"{ranks} ranks share {devices} visible device{'s' if devices > 1 else ''}, which some backends refuse. {fix}"
    )
