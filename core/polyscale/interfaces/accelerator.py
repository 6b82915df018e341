"""Accelerator: a device type. It covers the device and nothing else; features belong to other kinds.

Notable: 15 methods, plus declared capabilities, ``diagnose`` and ``toolchain``. ``TorchAccelerator``
(``polyscale.torch_accelerator``) implements all of them over ``torch.accelerator``, so a vendor's class states names.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Capabilities:
    """What the device can do. A declared capability must work; an undeclared one raises ``UnsupportedError``.

    Attributes:
        dtypes: names of the dtypes that matrix products take ("fp64", "fp32", "bf16", "fp16").
        streams: work can be queued on several streams.
        graphs: work can be captured and replayed.
        pinned_memory: host memory can be pinned for asynchronous copies.
        memory_statistics: allocated, reserved and peak bytes are counted by the device's allocator.
    """

    dtypes: frozenset[str]
    streams: bool = False
    graphs: bool = False
    pinned_memory: bool = False
    memory_statistics: bool = False


@dataclass(frozen=True)
class MemoryUse:
    """Bytes of one device (for cpu: of the process)."""

    allocated: int
    reserved: int
    peak: int
    total: int


@dataclass(frozen=True)
class Finding:
    """One row of ``scale-report`` about drivers, toolkits and compilers."""

    name: str
    value: str
    ok: bool = True
    fix: str = ""


@dataclass(frozen=True)
class Toolchain:
    """How kernels for the device are compiled: compiler path, flags, root of the toolkit."""

    compiler: str
    flags: tuple[str, ...] = ()
    root: str = ""


class Stream(Protocol):
    """A queue of device work; a context manager that makes it the current one."""

    def __enter__(self) -> Any: ...
    def __exit__(self, *exc: object) -> Any: ...
    def synchronize(self) -> None:
        """Block the host until the queued work is done."""

    def wait_stream(self, other: Any) -> None:
        """Let later work here wait for the work queued on ``other`` so far."""


class Event(Protocol):
    """A marker in a stream."""

    def record(self, stream: Any = None) -> None:
        """Put the marker behind the work queued so far."""

    def synchronize(self) -> None:
        """Block the host until the marker is reached."""


@runtime_checkable
class Accelerator(Protocol):
    """A device type.

    Attributes:
        name: the plugin's name ("cpu").
        device_type: torch's name for it (``torch.device(device_type)``).
        auto: whether ``auto`` may choose it.
        communications: names of communication backends, best first.
        visible_devices_variable: environment variable that masks devices, or "".
        capabilities: what it can do.
    """

    name: str
    device_type: str
    auto: bool
    communications: tuple[str, ...]
    visible_devices_variable: str
    capabilities: Capabilities

    def is_available(self) -> bool:
        """Return whether a device can be used now; never raises, never registers anything."""

    def why_unavailable(self) -> str:
        """Say what is missing and what to install; "" when available."""

    def activate(self) -> None:
        """Do what must be done once per process before the first tensor; a second call must be harmless."""

    def device_count(self) -> int:
        """Number of visible devices."""

    def device(self, index: int | None = None) -> torch.device:
        """The device of ``index`` (None: the current one)."""

    def set_device(self, index: int) -> None:
        """Make ``index`` the current device of this process."""

    def synchronize(self) -> None:
        """Block until the current device's work is done."""

    def memory(self) -> MemoryUse:
        """Bytes in use on the current device."""

    def reset_peak_memory(self) -> None:
        """Start the peak anew."""

    def empty_cache(self) -> None:
        """Give cached memory back to the device."""

    def manual_seed(self, seed: int) -> None:
        """Seed the device's generator (the host's is torch's own)."""

    def rng_state(self) -> torch.Tensor:
        """State of the current device's generator (uint8, on the host)."""

    def set_rng_state(self, state: torch.Tensor) -> None:
        """Restore what ``rng_state`` gave."""

    def new_stream(self) -> Stream:
        """A new queue of work (a no-op where the device has none)."""

    def new_event(self) -> Event:
        """A new marker (a no-op where the device has none)."""

    def diagnose(self) -> list[Finding]:
        """Rows for the report: driver, toolkit, compiler."""

    def toolchain(self) -> Toolchain | None:
        """The compiler for kernels; None where there is none."""
