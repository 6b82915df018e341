"""What torch knows of a device type that somebody makes an accelerator for.

Notable: torch is asked, so no device type is named here but those that compute nothing of their own. Asking imports
torch, and activates nothing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from polyscale.errors import PolyscaleError

_NO_ACCELERATORS = ("cpu", "meta")


@dataclass(frozen=True)
class DeviceType:
    """A device type.

    Attributes:
        name: torch's name for it, or the one that its package will register.
        known: whether torch accepts it in ``torch.device``.
        has_module: whether torch has the module ``torch.<name>`` without importing anything else.
        communication: the c10d backend that torch uses for it by default; "gloo" where it knows none.
    """

    name: str
    known: bool
    has_module: bool
    communication: str


def device_type(name: str) -> DeviceType:
    """Ask torch about device type ``name``.

    Raises:
        PolyscaleError: it cannot be a device type, or is none that an accelerator could be made for.
    """
    import torch

    given = f"Device type {name!r}"
    if not re.fullmatch(r"[a-z_]+", name):
        why = "Torch's names of device types are lower-case letters and underscores, without digits"
        raise PolyscaleError(given, why=why, fix="Give a name such as 'acme'")
    if name in _NO_ACCELERATORS:
        why = "It is the host's own, not an accelerator" if name == "cpu" else "Its tensors have no values"
        raise PolyscaleError(given, why=why, fix="Leave --device-type out to begin with a simulated device")
    try:
        torch.device(name)
    except RuntimeError:
        return DeviceType(name, known=False, has_module=False, communication="gloo")
    try:
        torch.get_device_module(name)
    except (RuntimeError, AttributeError):
        return DeviceType(name, known=True, has_module=False, communication=_communication(name))
    return DeviceType(name, known=True, has_module=True, communication=_communication(name))


def check_free(name: str) -> None:
    """Refuse a name that torch or a configuration uses, for an accelerator of another device type.

    Raises:
        PolyscaleError: torch has a device type or a module of that name, or it is what configurations call no choice.
    """
    import torch

    given, other = f"Name {name!r} for a new accelerator", "Take another name"
    if name == "auto":
        raise PolyscaleError(given, why="It stands for whichever device is there", fix=other)
    try:
        torch.device(name)
    except RuntimeError:
        if hasattr(torch, name):  # the device's own module would be torch.<name>
            raise PolyscaleError(given, why=f"torch.{name} is something else", fix=other) from None
        return
    if name in _NO_ACCELERATORS:
        raise PolyscaleError(given, why="Torch uses it", fix=other)
    raise PolyscaleError(
        given,
        why="Torch has a device type of that name",
        fix=f"Take another name, or add --device-type {name} to make a plugin for that device",
    )


def _communication(name: str) -> str:
    import torch.distributed as dist

    if not dist.is_available():
        return "gloo"
    try:
        return str(dist.get_default_backend_for_device(name))
    except ValueError:
        return "gloo"
