"""The simulated device: an extension of torch in C++, and what makes it one of torch's device types.

Notable: the same extension can be registered under any name, once per process, since torch has one slot for device
types that are not its own. Importing this package imports no torch and builds nothing; ``register`` does.

The C++ files, in the order in which to read them: ``devices.h`` and ``memory.cpp`` (memory and its accounting, faults),
``aliases`` (host tensors over device memory), ``fallback`` (every operator), ``kernels.cpp`` and ``recurrent.cpp``
(those that need the device), ``streams`` and ``late`` (order), ``random``, ``pinned``, ``hooks``, ``autocast.cpp``,
``binding.cpp``.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyscale.errors import UnsupportedError
from polyscale.interfaces.op import KernelModule, Source

if TYPE_CHECKING:
    import torch

# The slowest to compile come first.
_FILES = (
    "kernels", "autocast", "binding", "fallback", "recurrent",
    "late", "memory", "streams", "hooks", "pinned", "random", "aliases",
)  # fmt: skip

MODULE = KernelModule(
    name="polyscale_sim_device",
    folder=Path(__file__).parent,
    device_type="cpu",
    sources=tuple(Source(f"{name}.cpp") for name in _FILES),
    flags=("-O1", "-std=c++20", "-Wno-interference-size"),
    torch_headers=True,
    ahead=False,
)


def register(name: str = "sim") -> None:
    """Build or load the extension, and make it torch's device type ``name`` with ``torch.<name>`` and ``simccl``.

    A second call with the same name does nothing.

    Raises:
        UnsupportedError: another device type has torch's slot, or this one under another name, or the environment
            leaves no device.
        BuildError: the extension cannot be built here.
    """
    from polyscale import _torch as core_torch

    owner = core_torch.privateuse1_owner()
    if owner is not None:
        if owner == name and registered_name() == name:
            return
        raise UnsupportedError(
            f"Device type {name!r}",
            why=f"Torch has one slot for out-of-tree devices, and {owner!r} owns it in this process",
            fix=f"Use {owner!r}, or another process",
        )
    _claim(name)


def registered_name() -> str | None:
    """The name under which this process has registered the device; None before."""
    from polyscale import _torch as core_torch

    owner = core_torch.privateuse1_owner()
    module = sys.modules.get(f"torch.{owner}") if owner else None
    return owner if getattr(module, "SIMULATED", False) else None


def registered_count() -> int:
    """Number of devices of the registered device type."""
    return int(_device_module().device_count())


def extension() -> Any:
    """The C++ extension.

    Raises:
        UnsupportedError: the device is not registered in this process.
    """
    return _device_module().extension


def cpu_view(tensor: torch.Tensor) -> torch.Tensor:
    """A host tensor over the same memory, which it keeps alive; a host tensor is returned as it is.

    It is read behind the late work that is ordered before the current stream.
    """
    viewed: torch.Tensor = extension().cpu_view(tensor)
    return viewed


def late_write(to: torch.Tensor, source: torch.Tensor, stream: torch.Stream) -> None:
    """Copy ``source`` (host or device, kept until then) to device tensor ``to``, as work of ``stream``.

    Where work is late (``faults.late``), ``to`` holds NaN until it is read by an operator that is ordered behind
    ``stream``, or the host has waited; otherwise it is copied now.
    """
    extension().late_write(to, source, stream.stream_id)


def _device_module() -> Any:
    name = registered_name()
    if name is None:
        raise UnsupportedError(
            "The simulated device", why="It is not registered in this process", fix="Call polyscale_sim.device.register"
        )
    return sys.modules[f"torch.{name}"]


def _claim(name: str) -> None:
    from polyscale import ops
    from polyscale_sim import _torch, communication, env, faults
    from polyscale_sim.device.module import device_module

    count = env.device_count()
    if not count:
        raise UnsupportedError(f"Device type {name!r}", why=env.explain_mask(), fix=f"Unset {env.MASK}")
    env.faults()  # what cannot be read is refused before anything is registered
    env.memory_limit()
    loaded = ops.load_module(MODULE)
    _torch.claim(name)
    loaded.install(count)
    _torch.register_device_module(name, device_module(name, loaded))
    _torch.add_methods()
    faults.reset()
    communication.register(name)
