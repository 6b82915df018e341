"""Options of the plugin, and what keys of ``zero_optimization`` mean to it.

Notable: DeepSpeed's defaults for stage 3 keep a small model whole on every rank (1e9 elements may be live, 1e5 elements
persist). Here a limit applies when it is set; unset, a unit is freed after use and one unit is gathered ahead.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from polyscale.errors import ConfigError, nearest
from polyscale_zero.gathering import Limits

if TYPE_CHECKING:
    from polyscale.config import Config

HONOURED = frozenset(
    f"zero_optimization.{key}"
    for key in (
        "reduce_bucket_size",
        "overlap_comm",
        "stage3_prefetch_bucket_size",
        "stage3_param_persistence_threshold",
        "stage3_model_persistence_threshold",
        "stage3_max_live_parameters",
        "stage3_max_reuse_distance",
        "leaf_module",
    )
)
CPU_BUFFER_BYTES = 32 * 2**20
"""Most bytes of a buffer on the CPU: larger blocks are given back to the system at each free, and cost page faults."""


@dataclass(frozen=True)
class Options:
    """``backends.options.zero``.

    Attributes:
        unit_classes: class names of the units; None: found.
        share_host_memory: stages 1 and 2: parameters lie once in the host's memory, for all its ranks.
        check_shared_memory: find writes of a rank into parts that others own.
    """

    unit_classes: tuple[str, ...] | None = None
    share_host_memory: bool = False
    check_shared_memory: bool = False


def read_options(given: Mapping[str, Any]) -> Options:
    """Check the options.

    Raises:
        ConfigError: one is unknown or of the wrong type.
    """
    known = ("unit_classes", "share_host_memory", "check_shared_memory")
    for name, value in given.items():
        if name not in known:
            near = nearest(name, known)
            raise ConfigError(
                f"backends.options.zero.{name}",
                why="zero has no such option",
                fix=f"Did you mean {near!r}?" if near else f"Options: {', '.join(known)}",
            )
        if name != "unit_classes" and not isinstance(value, bool):
            raise ConfigError(
                f"backends.options.zero.{name} = {value!r}", why="it must be true or false", fix="Write true or false"
            )
    classes = given.get("unit_classes")
    listed = isinstance(classes, (list, tuple)) and classes and all(isinstance(name, str) for name in classes)
    if classes is not None and not listed:
        raise ConfigError(
            f"backends.options.zero.unit_classes = {classes!r}",
            why="it must be a list of class names",
            fix='Write for example ["GPT2Block"]',
        )
    return Options(
        tuple(classes) if classes is not None else None,
        bool(given.get("share_host_memory", False)),
        bool(given.get("check_shared_memory", False)),
    )


def set_number(config: Config, key: str) -> int | None:
    """A number of ``zero_optimization``, or None where it was not set (or is "auto")."""
    zero = config.zero_optimization
    value = getattr(zero, key)
    return int(value) if key in zero.model_fields_set and not isinstance(value, str) else None


def limits(config: Config) -> Limits:
    """How much may be whole at stage 3."""
    live, reuse = set_number(config, "stage3_max_live_parameters"), set_number(config, "stage3_max_reuse_distance")
    return Limits(
        ahead=set_number(config, "stage3_prefetch_bucket_size"),
        live=live if live is not None else 2**62,
        reuse=reuse or 0,
    )


def buffer_numel(config: Config, *, itemsize: int, on_cpu: bool) -> int:
    """Most elements of one flat buffer; a larger parameter has one of its own."""
    bucket = set_number(config, "reduce_bucket_size") or 2**62
    return max(1, min(bucket, CPU_BUFFER_BYTES // itemsize) if on_cpu else bucket)
