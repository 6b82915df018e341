"""The module ``torch.<name>`` of the simulated device: what torch, FSDP2, DTensor and users call for a device type.

Notable: functions are methods of one object that knows the name, since the name is chosen at registration. Memory,
streams and events go through ``torch.accelerator`` and torch's generic classes, so they mean the same there and here.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any, Union

from polyscale_sim import _torch

if TYPE_CHECKING:
    import torch

Device = Union["torch.device", str, int, None]


@dataclass(frozen=True)
class Properties:
    """What is known of a device. Sizes in bytes."""

    name: str
    total_memory: int
    multi_processor_count: int = 1
    major: int = 1
    minor: int = 0


class DeviceModule(ModuleType):
    """The module. Every ``device`` argument is an index, a name, a ``torch.device`` or None, the current device."""

    SIMULATED = True

    def __init__(self, name: str, extension: Any) -> None:
        super().__init__(f"torch.{name}", "The simulated device; see polyscale_sim.")
        self._device_type = name
        self.extension = extension
        self.Stream = _stream_class(name)
        self.device = _device_context(self)
        self.StreamContext = StreamContext
        self._initialized = True  # activation checkpointing saves the random state of an initialised device only

    # Devices

    def is_available(self) -> bool:
        """Always: it is registered."""
        return True

    def is_initialized(self) -> bool:
        """Always."""
        return True

    def init(self) -> None:
        """Nothing is left to do."""

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        """Number of visible devices."""
        return int(self.extension.device_count())

    def current_device(self) -> int:
        """Index of this thread's current device."""
        import torch

        return int(torch.accelerator.current_device_index())

    def set_device(self, device: Device) -> None:
        """Make a device current on this thread."""
        import torch

        torch.accelerator.set_device_index(self.index_of(device))

    def synchronize(self, device: Device = None) -> None:
        """Wait for all work of a device."""
        import torch

        torch.accelerator.synchronize(self.index_of(device))

    def get_device_properties(self, device: Device = None) -> Properties:
        """Name and memory."""
        return Properties(self.get_device_name(device), self.mem_get_info(device)[1])

    def get_device_name(self, device: Device = None) -> str:
        """Such as "sim device 0"."""
        return f"{self._device_type} device {self.index_of(device)}"

    def get_device_capability(self, device: Device = None) -> tuple[int, int]:
        """Version of the device."""
        properties = self.get_device_properties(device)
        return properties.major, properties.minor

    def can_device_access_peer(self, device: Device, peer: Device) -> bool:
        """Whether one device reads another's memory: all do."""
        return self.index_of(device) != self.index_of(peer)

    def index_of(self, device: Device) -> int:
        """The index that ``device`` means.

        Raises:
            RuntimeError: there is no such device, or it is of another type.
        """
        import torch

        if device is None:
            return self.current_device()
        if isinstance(device, str):
            device = torch.device(device)
        if isinstance(device, torch.device):
            if device.type != self._device_type:
                raise RuntimeError(f"expected a device of type {self._device_type}, not {device}")
            return self.current_device() if device.index is None else self.index_of(device.index)
        count = self.device_count()
        if not 0 <= device < count:
            there = f"there is 1 device, {self._device_type}:0" if count == 1 else f"there are {count} devices"
            raise RuntimeError(f"{self._device_type}:{device} does not exist: {there}, 0 to {count - 1}")
        return int(device)

    # Memory

    def memory_allocated(self, device: Device = None) -> int:
        """Bytes that are allocated."""
        import torch

        return int(torch.accelerator.memory_allocated(self.index_of(device)))

    def max_memory_allocated(self, device: Device = None) -> int:
        """The most bytes that were allocated at a time since the peak was reset."""
        import torch

        return int(torch.accelerator.max_memory_allocated(self.index_of(device)))

    def memory_reserved(self, device: Device = None) -> int:
        """As ``memory_allocated``: there is no cache."""
        import torch

        return int(torch.accelerator.memory_reserved(self.index_of(device)))

    def max_memory_reserved(self, device: Device = None) -> int:
        """As ``max_memory_allocated``."""
        import torch

        return int(torch.accelerator.max_memory_reserved(self.index_of(device)))

    def memory_stats(self, device: Device = None) -> dict[str, Any]:
        """All counters by their names."""
        import torch

        return dict(torch.accelerator.memory_stats(self.index_of(device)))

    def reset_peak_memory_stats(self, device: Device = None) -> None:
        """Start the peak anew."""
        import torch

        torch.accelerator.reset_peak_memory_stats(self.index_of(device))

    def reset_accumulated_memory_stats(self, device: Device = None) -> None:
        """Start the totals anew."""
        import torch

        torch.accelerator.reset_accumulated_memory_stats(self.index_of(device))

    def mem_get_info(self, device: Device = None) -> tuple[int, int]:
        """Free and total bytes."""
        import torch

        free, total = torch.accelerator.get_memory_info(self.index_of(device))
        return int(free), int(total)

    def empty_cache(self) -> None:
        """Nothing is cached."""

    def pinned_memory_allocated(self) -> int:
        """Bytes of pinned host memory of this process."""
        return int(self.extension.pinned_bytes())

    # Random numbers

    @property
    def default_generators(self) -> tuple[torch.Generator, ...]:
        """The generators of all devices."""
        return tuple(self.extension.default_generator(index) for index in range(self.device_count()))

    def manual_seed(self, seed: int) -> None:
        """Seed the current device."""
        self._generator(None).manual_seed(int(seed))

    def manual_seed_all(self, seed: int) -> None:
        """Seed every device."""
        for generator in self.default_generators:
            generator.manual_seed(int(seed))

    def seed(self) -> int:
        """Seed the current device at random; returns the seed."""
        return int(self._generator(None).seed())

    def seed_all(self) -> None:
        """Seed every device at random, all alike."""
        self.manual_seed_all(self.seed())

    def initial_seed(self) -> int:
        """The current device's seed."""
        return int(self._generator(None).initial_seed())

    def get_rng_state(self, device: Device = None) -> torch.Tensor:
        """State of a device's generator (uint8, on the host)."""
        state: torch.Tensor = self._generator(device).get_state()
        return state

    def set_rng_state(self, new_state: torch.Tensor, device: Device = None) -> None:
        """Restore what ``get_rng_state`` gave."""
        self._generator(device).set_state(new_state)

    def get_rng_state_all(self) -> list[torch.Tensor]:
        """States of all devices' generators."""
        return [generator.get_state() for generator in self.default_generators]

    def set_rng_state_all(self, new_states: Iterable[torch.Tensor]) -> None:
        """Restore what ``get_rng_state_all`` gave."""
        for index, state in enumerate(new_states):
            self.set_rng_state(state, index)

    def _generator(self, device: Device) -> torch.Generator:
        generator: torch.Generator = self.extension.default_generator(self.index_of(device))
        return generator

    # Streams

    def Event(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> torch.Event:
        """A new marker (torch's events take none of a subclass)."""
        import torch

        return torch.Event(
            device=self._device_type, enable_timing=enable_timing, blocking=blocking, interprocess=interprocess
        )

    def current_stream(self, device: Device = None) -> torch.Stream:
        """This thread's current stream of a device."""
        import torch

        return torch.accelerator.current_stream(self.index_of(device))

    def default_stream(self, device: Device = None) -> torch.Stream:
        """A device's first stream."""
        import torch

        index = self.index_of(device)
        return torch.Stream(stream_id=0, device_index=index, device_type=_torch.device_type_number())

    def set_stream(self, stream: torch.Stream) -> None:
        """Make a stream, and its device, current on this thread."""
        import torch

        torch.accelerator.set_stream(stream)

    def stream(self, stream: torch.Stream | None) -> Any:
        """A context in which ``stream`` and its device are current; None changes nothing."""
        return nullcontext() if stream is None else StreamContext(stream)

    # Mixed precision

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        """What ``torch.autocast`` may compute in."""
        import torch

        return [torch.bfloat16, torch.float16]

    def is_bf16_supported(self, including_emulation: bool = True) -> bool:
        """It is."""
        return True


class StreamContext:
    """Makes a stream and its device current."""

    def __init__(self, stream: torch.Stream) -> None:
        self._stream = stream
        self._before: list[tuple[int, Any]] = []

    def __enter__(self) -> torch.Stream:
        import torch

        inside = torch.accelerator.current_stream(self._stream.device.index)
        self._before.append((torch.accelerator.current_device_index(), inside))
        torch.accelerator.set_stream(self._stream)
        return self._stream

    def __exit__(self, *exc: object) -> None:
        import torch

        device, stream = self._before.pop()
        torch.accelerator.set_stream(stream)
        torch.accelerator.set_device_index(device)


def device_module(name: str, extension: Any) -> ModuleType:
    """Make the module for a device type of this name."""
    return DeviceModule(name, extension)


def _device_context(module: DeviceModule) -> type:
    class DeviceContext:
        """Makes a device current; None and a negative index change nothing."""

        def __init__(self, device: Device) -> None:
            self.idx = -1 if device is None or device == -1 else module.index_of(device)
            self._before: list[int] = []

        def __enter__(self) -> None:
            self._before.append(_torch.exchange_device(self.idx))

        def __exit__(self, *exc: object) -> None:
            _torch.exchange_device(self._before.pop())

    return DeviceContext


def _stream_class(name: str) -> type:
    import torch

    class Stream(torch.Stream):
        """A queue of work on a device (None: the current one)."""

        def __new__(cls, device: Device = None, priority: int = 0, **parts: Any) -> Stream:
            if parts:
                made: Stream = super().__new__(cls, **parts)
                return made
            if device is None or isinstance(device, int):
                device = torch.device(name, torch.accelerator.current_device_index() if device is None else device)
            return super().__new__(cls, device=device, priority=priority)

    return Stream
