"""The only file of this package that reads the environment: how many devices, which are visible, and their faults.

Notable: faults are set for the devices as the process sees them, after the mask. Nothing here imports torch.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from polyscale.errors import UnsupportedError

DEVICES = "POLYSCALE_SIM_DEVICES"
MASK = "POLYSCALE_SIM_VISIBLE_DEVICES"
MEMORY = "POLYSCALE_SIM_MEMORY"
FAIL_ALLOCATION = "POLYSCALE_SIM_FAIL_ALLOCATION"
DEAD_DEVICE = "POLYSCALE_SIM_DEAD_DEVICE"
LATE = "POLYSCALE_SIM_LATE"

DEFAULT_DEVICES = 4
MOST_DEVICES = 64
MOST_MEMORY = 1 << 60
DEFAULT_MEMORY = 16 << 30
_UNITS = {"": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "KB": 10**3, "MB": 10**6, "GB": 10**9}
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("", "0", "false", "no", "off")


@dataclass(frozen=True)
class Faults:
    """Faults asked for by the environment.

    Attributes:
        fail_allocation: (device, k): the k-th allocation on a device fails; None: none.
        dead: devices that answer no call.
        late: whether non-blocking copies and collectives are late.
    """

    fail_allocation: tuple[int, int] | None = None
    dead: tuple[int, ...] = ()
    late: bool = False


def device_count() -> int:
    """Number of visible devices.

    Raises:
        UnsupportedError: a variable cannot be read.
    """
    return len(visible())


def visible() -> tuple[int, ...]:
    """The devices that this process sees, by their numbers without the mask; the list ends at the first absent one.

    Raises:
        UnsupportedError: a variable cannot be read.
    """
    count = _integer(DEVICES, os.environ.get(DEVICES) or str(DEFAULT_DEVICES), least=1, most=MOST_DEVICES)
    mask = os.environ.get(MASK)
    if mask is None:
        return tuple(range(count))
    seen: list[int] = []
    for text in mask.split(","):
        if not text.strip().isdecimal() or int(text) >= count or int(text) in seen:
            break
        seen.append(int(text))
    return tuple(seen)


def explain_mask() -> str:
    """Say why the mask leaves no device; "" where it leaves one."""
    mask = os.environ.get(MASK)
    if mask is None or visible():
        return ""
    count = _integer(DEVICES, os.environ.get(DEVICES) or str(DEFAULT_DEVICES), least=1, most=MOST_DEVICES)
    return f"{MASK}={mask!r} starts with no device that exists; there are {count}, 0 to {count - 1}"


def memory_limit() -> int:
    """Bytes of each device.

    Raises:
        UnsupportedError: the variable cannot be read.
    """
    text = os.environ.get(MEMORY)
    if not text:
        return DEFAULT_MEMORY
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    unit = _UNITS.get(found.group(2).upper()) if found else None
    if found is None or unit is None:
        why = "it must be bytes, or a number with KiB, MiB, GiB, KB, MB or GB"
        raise UnsupportedError(f"{MEMORY}={text!r}", why=why, fix='Such as "512MiB"')
    limit = int(float(found.group(1)) * unit)
    if limit > MOST_MEMORY:
        raise UnsupportedError(f"{MEMORY}={text!r}", why=f"at most {MOST_MEMORY >> 40} TiB can be counted")
    return limit


def faults() -> Faults:
    """Faults asked for. ``POLYSCALE_SIM_FAIL_ALLOCATION`` is ``k`` (of device 0) or ``device:k``.

    Raises:
        UnsupportedError: a variable cannot be read.
    """
    count = device_count()
    failing = None
    if text := os.environ.get(FAIL_ALLOCATION):
        device, separator, k = text.rpartition(":")
        index = _integer(FAIL_ALLOCATION, device, least=0, most=count - 1) if separator else 0
        failing = (index, _integer(FAIL_ALLOCATION, k, least=1))
    names = [name for name in os.environ.get(DEAD_DEVICE, "").split(",") if name.strip()]
    dead = tuple(_integer(DEAD_DEVICE, name, least=0, most=count - 1) for name in names)
    return Faults(fail_allocation=failing, dead=dead, late=_switch(LATE))


def _integer(variable: str, text: str, *, least: int, most: int | None = None) -> int:
    value = int(text) if re.fullmatch(r"\s*\d+\s*", text) else -1
    if value < least or (most is not None and value > most):
        valid = f"{least} or more" if most is None else f"{least} to {most}"
        raise UnsupportedError(f"{variable}={os.environ.get(variable)!r}", why=f"{text!r} is not a number of {valid}")
    return value


def _switch(variable: str) -> bool:
    text = os.environ.get(variable, "").strip().lower()
    if text not in (*_TRUE, *_FALSE):
        raise UnsupportedError(f"{variable}={os.environ.get(variable)!r}", why="it is neither 1 nor 0")
    return text in _TRUE
