"""CpuAccelerator: the CPU behind the accelerator protocol.

Notable: ``torch.accelerator`` raises for nearly every call where there is no device, so this stands on its own. Memory
is that of the process, as the system counts it. There is one CPU: every rank of a host shares it, whatever its index.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from polyscale.device_streams import NoEvent, NoStream
from polyscale.errors import UnsupportedError
from polyscale.interfaces.accelerator import Capabilities, Finding, MemoryUse, Toolchain
from polyscale_cpu import host, process

if TYPE_CHECKING:
    import torch


class CpuAccelerator:
    """The CPU of this host."""

    name = "cpu"
    device_type = "cpu"
    auto = True
    communications: tuple[str, ...] = ("shm", "gloo", "mpi")
    visible_devices_variable = ""
    capabilities = Capabilities(dtypes=frozenset({"fp64", "fp32", "bf16", "fp16"}))

    def is_available(self) -> bool:
        """A CPU is always there."""
        return True

    def why_unavailable(self) -> str:
        """Nothing is missing."""
        return ""

    def activate(self) -> None:
        """Let freed tensor memory stay with the process, so that the next allocation faults no pages in again."""
        process.keep_freed_memory()

    def device_count(self) -> int:
        """One, which all ranks of a host share."""
        return 1

    def device(self, index: int | None = None) -> torch.device:
        """The CPU, for every index."""
        import torch

        _check(index)
        return torch.device("cpu")

    def set_device(self, index: int) -> None:
        """Nothing to do: every rank of a host shares the CPU."""
        _check(index)

    def synchronize(self) -> None:
        """Return at once: work is done when its call returns."""

    def memory(self) -> MemoryUse:
        """Resident bytes of the process, now and at most, and the memory of the host or container."""
        resident, peak = process.memory()
        return MemoryUse(allocated=resident, reserved=resident, peak=peak, total=host.total_memory())

    def reset_peak_memory(self) -> None:
        """Start the peak anew, where the system allows it (Linux); elsewhere it stays that of the process's life."""
        process.reset_peak()

    def empty_cache(self) -> None:
        """Give freed memory back to the system, where the C library can."""
        process.release_freed_memory()

    def manual_seed(self, seed: int) -> None:
        """Seed torch's own generator, which is the CPU's."""
        import torch

        torch.default_generator.manual_seed(seed)

    def rng_state(self) -> torch.Tensor:
        """State of torch's own generator (uint8)."""
        import torch

        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor) -> None:
        """Restore what ``rng_state`` gave."""
        import torch

        torch.set_rng_state(state)

    def new_stream(self) -> NoStream:
        """A stream that does nothing."""
        return NoStream()

    def new_event(self) -> NoEvent:
        """An event that does nothing."""
        return NoEvent()

    def diagnose(self) -> list[Finding]:
        """Processor, cores, threads, memory, compiler."""
        return host.findings(self.toolchain())

    def toolchain(self) -> Toolchain | None:
        """The host's C++ compiler."""
        return host.toolchain()


def _check(index: int | None) -> None:
    if index is not None and index < 0:
        raise UnsupportedError(f"cpu device {index}", why="an index is at least 0")
