"""A stand-in for the module of a device that is absent: the recorded names and signatures, and nothing else.

Notable: a call with a name or an argument that the vendor's module does not have fails as it would there. What the
functions do is a small model of a device (an index, bytes, a generator, a log of work), enough to see that each call
of an accelerator reached the right function; what a vendor's module does beyond it is not tested. A stand-in changes
torch for the whole process: install it in a process of its own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

from polyscale.testing.signatures import Record

if TYPE_CHECKING:
    import torch

_TOTAL = 1 << 30


class StandIn:
    """A module with the names of ``record``, over a model of a few devices.

    Attributes:
        module: the module.
        calls: (name, arguments) of every call so far, in order.
        devices: how many devices there are; may be set.
    """

    def __init__(self, record: Record, *, devices: int = 2) -> None:
        """``record``: what the module has; ``devices``: how many there are."""
        import torch

        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.devices = devices
        self.index = 0
        self.allocated = [0] * 64
        self.peak = [0] * 64
        self.generators = [torch.Generator() for _ in range(64)]
        self.type = record.module.rpartition(".")[2]
        self.module = ModuleType(record.module)
        self._streams: list[Any] = []
        for name, signature in record.names.items():
            if "." not in name and not _is_class(name, record):
                setattr(self.module, name, self._function(name, signature))
        for name in (name for name in record.names if _is_class(name, record)):
            setattr(self.module, name, self._class(name, record))

    def install(self) -> None:
        """Make it ``torch.<type>``; the type becomes the owner of torch's slot for out-of-tree devices if it is one.

        ``torch.Stream`` and ``torch.Event`` are replaced too: torch cannot make one for a device that is absent.
        """
        import torch

        try:
            torch.device(self.type)
        except RuntimeError:
            torch.utils.rename_privateuse1_backend(self.type)  # type: ignore[attr-defined]
        setattr(torch, self.type, self.module)
        sys.modules[self.module.__name__] = self.module
        for name, signature in _TORCH_STREAMS.items():
            setattr(torch, name, self._class(name, Record("torch", "", "", signature)))

    def hold(self, size: int) -> None:
        """Let ``size`` more bytes be allocated on the current device; negative: fewer."""
        self.allocated[self.index] += size
        self.peak[self.index] = max(self.peak[self.index], self.allocated[self.index])

    def called(self) -> set[str]:
        """Names that were called so far."""
        return {name for name, _ in self.calls}

    def _function(self, name: str, signature: str, *, bound: bool = False) -> Callable[..., Any]:
        """A function of this signature; the interpreter itself judges how it is called."""
        wanted = signature[1:-1]
        arguments = ", ".join(part for part in ("self" if bound else "", wanted) if part)
        scope = {"_act": self._act}
        exec(f"def made({arguments}):\n    return _act({name!r}, dict(locals()))\n", scope)
        made: Any = scope["made"]
        made.__name__ = name.rpartition(".")[2]
        return made  # type: ignore[no-any-return]

    def _class(self, name: str, record: Record) -> type:
        members: dict[str, Any] = {"__init__": self._function(f"{name}.__init__", record.names[name], bound=True)}
        for entry, signature in record.names.items():
            owner, _, method = entry.partition(".")
            if owner == name and method:
                members[method] = self._function(entry, signature, bound=True)
        return type(name, (), members)

    def _act(self, name: str, arguments: dict[str, Any]) -> Any:
        self.calls.append((name, arguments))
        action = _ACTIONS.get(name.rpartition(".")[2] if "." in name else name)
        if action is None:
            raise NotImplementedError(f"The stand-in for {self.module.__name__} does nothing when {name} is called")
        return action(self, arguments)

    def _at(self, arguments: dict[str, Any]) -> int:
        """Index of the device that a call is about."""
        import torch

        device = next((arguments[key] for key in ("device", "device_name") if key in arguments), None)
        if isinstance(device, str):
            device = torch.device(device)
        if isinstance(device, torch.device):
            if device.type != self.type:
                raise ValueError(f"Expected a {self.type} device, but got: {device}")
            device = device.index
        index = self.index if device is None else int(device)
        if not 0 <= index < self.devices:
            raise AssertionError(f"Invalid device id {index}")
        return index


def pretend_installed(*modules: str) -> None:
    """Let importing ``modules`` succeed in this process, with nothing in them."""
    for name in modules:
        for part in [name[:end] for end, letter in enumerate(f"{name}.") if letter == "."]:
            made = ModuleType(part)
            made.__spec__ = ModuleSpec(part, None, is_package=True)
            made.__path__ = []
            sys.modules[part] = made


def _is_class(name: str, record: Record) -> bool:
    return name in ("Stream", "Event") or any(entry.startswith(f"{name}.") for entry in record.names)


def _set_device(fake: StandIn, given: dict[str, Any]) -> None:
    fake.index = fake._at(given)


def _reset_peak(fake: StandIn, given: dict[str, Any]) -> None:
    fake.peak[fake._at(given)] = fake.allocated[fake._at(given)]


def _rng_state(fake: StandIn, given: dict[str, Any]) -> torch.Tensor:
    return fake.generators[fake._at(given)].get_state()


def _set_rng_state(fake: StandIn, given: dict[str, Any]) -> None:
    fake.generators[fake._at(given)].set_state(given["new_state"])


def _seed(fake: StandIn, given: dict[str, Any]) -> None:
    fake.generators[fake.index].manual_seed(given["seed"])


class _Entered:
    """What ``module.stream(...)`` gives: a context in which a stream is the current one."""

    def __init__(self, fake: StandIn, stream: Any) -> None:
        self._fake, self._stream = fake, stream

    def __enter__(self) -> None:
        self._fake._streams.append(self._stream)

    def __exit__(self, *exc: object) -> None:
        assert self._fake._streams.pop() is self._stream


# The documented signatures of torch.Stream and torch.Event (torch 2.13), which are not in Python.
_TORCH_STREAMS = {
    "Stream": {
        "Stream": "(device=None, *, priority=0)",
        "Stream.synchronize": "()",
        "Stream.wait_stream": "(other)",
        "Stream.__enter__": "()",
        "Stream.__exit__": "(*exc)",
    },
    "Event": {
        "Event": "(device=None, *, enable_timing=False, blocking=False, interprocess=False)",
        "Event.record": "(stream=None)",
        "Event.synchronize": "()",
    },
}

_ACTIONS: dict[str, Callable[[StandIn, dict[str, Any]], Any]] = {
    "is_available": lambda fake, given: fake.devices > 0,
    "device_count": lambda fake, given: fake.devices,
    "current_device": lambda fake, given: fake.index,
    "set_device": _set_device,
    "synchronize": lambda fake, given: None,
    "empty_cache": lambda fake, given: None,
    "is_bf16_supported": lambda fake, given: True,
    "memory_allocated": lambda fake, given: fake.allocated[fake._at(given)],
    "memory_reserved": lambda fake, given: 2 * fake.allocated[fake._at(given)],
    "max_memory_allocated": lambda fake, given: fake.peak[fake._at(given)],
    "reset_peak_memory_stats": _reset_peak,
    "mem_get_info": lambda fake, given: (_TOTAL - fake.allocated[fake._at(given)], _TOTAL),
    "get_device_name": lambda fake, given: f"Stand-in {fake._at(given)}",
    "get_device_capability": lambda fake, given: (8, 0),
    "get_device_properties": lambda fake, given: SimpleNamespace(total_memory=_TOTAL, has_fp64=True),
    "manual_seed": _seed,
    "get_rng_state": _rng_state,
    "set_rng_state": _set_rng_state,
    "stream": lambda fake, given: _Entered(fake, given["stream"]),
    "__init__": lambda fake, given: None,
    "__enter__": lambda fake, given: given["self"],
    "__exit__": lambda fake, given: None,
    "wait_stream": lambda fake, given: None,
    "record": lambda fake, given: None,
    "query": lambda fake, given: True,
}
