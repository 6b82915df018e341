"""Faults of the simulated device: memory that runs out, a device that dies, work that is late.

Notable: they act on the devices of this process and need a registered device. ``reset`` puts everything back to what
the environment asks for.
"""

from __future__ import annotations

from polyscale_sim import device as sim_device
from polyscale_sim import env


def fail_allocation(k: int, device: int = 0) -> None:
    """Let the ``k``-th allocation on a device from now on raise ``torch.OutOfMemoryError``; 0 takes it back.

    Results and temporary memory of operators count, each by itself; tensors of no bytes do not.
    """
    sim_device.extension().fail_allocation(device, k)


def kill_device(index: int) -> None:
    """Let every later allocation, operator, copy and wait on a device raise ``RuntimeError`` with its name."""
    sim_device.extension().set_dead(index, True)


def revive_device(index: int) -> None:
    """Let a killed device answer again; its memory is as it was."""
    sim_device.extension().set_dead(index, False)


def late(on: bool = True) -> None:
    """Make non-blocking copies and collectives late: their destination holds NaN until its reader has waited.

    Turning it off delivers what is under way.
    """
    sim_device.extension().set_late(on)


def is_late() -> bool:
    """Whether non-blocking copies and collectives are late."""
    return bool(sim_device.extension().is_late())


def memory_limit(bytes: int, device: int | None = None) -> None:
    """Give one device, or all, this many bytes of memory. What is allocated beyond it stays."""
    extension = sim_device.extension()
    indices = range(sim_device.registered_count()) if device is None else (device,)
    for index in indices:
        extension.set_memory_limit(index, bytes)


def reset() -> None:
    """Put memory limits and faults back to what the environment asks for.

    Raises:
        UnsupportedError: a variable of the environment cannot be read.
    """
    extension = sim_device.extension()
    asked = env.faults()
    memory_limit(env.memory_limit())
    for index in range(sim_device.registered_count()):
        extension.fail_allocation(index, 0)
        extension.set_dead(index, index in asked.dead)
    if asked.fail_allocation is not None:
        extension.fail_allocation(*asked.fail_allocation)
    extension.set_late(asked.late)
