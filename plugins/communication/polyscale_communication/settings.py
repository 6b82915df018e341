"""The options of shm, ``backends.options.shm``.

Notable: torch makes a backend from a store, a rank, a size and a time-out, so the options are those of the process.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any, Literal

from polyscale.errors import ConfigError, nearest

_SPIN_US = 50.0
_LONGEST_SPIN_US = 100_000  # a rank that spins looks neither at its time-out nor whether the others live
_MOST_KEPT_MIB = 1 << 30
MIB = 1 << 20


@dataclass(frozen=True)
class Settings:
    """Options; ranks of a group take the smallest staging, and read memory in place where all of them may.

    Attributes:
        enabled: False: groups use gloo.
        staging_mib: MiB for each group and rank, through which data of ordinary memory go where they cannot be read in
            place.
        keep_mib: MiB of freed buffers that the process keeps for the next ones; more go back to the system.
        read_memory: whether ranks may read one another's ordinary memory (process_vm_readv(2)), where the system
            permits it.
        descriptors: how ranks get the descriptors of one another's memory: "proc" (/proc/<pid>/fd), "socket" (an
            abstract unix socket), "auto" (proc, and socket where that is refused).
        spin_us: microseconds of busy waiting before a rank sleeps, at most 100000; -1: 50 where each rank has a core,
            else 0.
    """

    enabled: bool = True
    staging_mib: float = 4.0
    keep_mib: float = 256.0
    read_memory: bool = True
    descriptors: Literal["auto", "proc", "socket"] = "auto"
    spin_us: float = -1.0

    def spin_s(self, ranks: int) -> float:
        """Seconds of busy waiting in a group of ``ranks``."""
        if self.spin_us >= 0:
            return self.spin_us * 1e-6
        return _SPIN_US * 1e-6 if ranks <= _cores() else 0.0


def settings_of(options: Mapping[str, Any]) -> Settings:
    """Check options.

    Raises:
        ConfigError: there is no such option, or not with this value.
    """
    defaults = {each.name: each.default for each in fields(Settings)}
    for name, value in options.items():
        if name not in defaults:
            near = nearest(name, list(defaults))
            hint = f"Did you mean {near!r}? " if near else ""
            raise ConfigError(f"backends.options.shm.{name}", fix=f"{hint}Valid: {', '.join(defaults)}")
        why = _why_not(name, value, defaults[name])
        if why:
            raise ConfigError(f"backends.options.shm.{name} = {value!r}", why=why)
    return Settings(**options)


def _why_not(name: str, value: Any, default: Any) -> str:
    if isinstance(default, bool):
        return "" if isinstance(value, bool) else "It is true or false"
    if isinstance(default, str):
        return "" if value in ("auto", "proc", "socket") else "It is 'auto', 'proc' or 'socket'"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return "It is a number"
    if name == "spin_us":
        return "" if value == -1 or 0 <= value <= _LONGEST_SPIN_US else f"It is 0 to {_LONGEST_SPIN_US}, or -1"
    if name == "staging_mib":
        return "" if 0 < value <= 4096 else "It is more than 0 and at most 4096"
    return "" if 0 <= value <= _MOST_KEPT_MIB else f"It is 0 to {_MOST_KEPT_MIB}"


@lru_cache(maxsize=1)
def _process() -> list[Settings]:
    return [Settings()]


def use(options: Mapping[str, Any]) -> None:
    """Make ``options`` those of the groups that this process makes from now on."""
    _process()[0] = settings_of(options)


def current() -> Settings:
    """The options of this process."""
    return _process()[0]


def _cores() -> int:
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else (os.cpu_count() or 1)
