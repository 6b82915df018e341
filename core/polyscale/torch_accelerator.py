"""TorchAccelerator: all of :class:`~polyscale.interfaces.accelerator.Accelerator` over what torch gives every device.

Notable: it asks ``torch.get_device_module(device_type)``, which covers in-tree devices and PrivateUse1 alike, and
``torch.accelerator`` where a module lacks a function; so a vendor's class states names and capabilities, and overrides
``absence`` to explain its own SDK. torch is imported inside the methods: loading a plugin to list it stays cheap.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, cast

from polyscale import env, sdk
from polyscale.claims import keep_claim
from polyscale.device_streams import ModuleEvent, ModuleStream
from polyscale.device_streams import NoEvent as NoEvent
from polyscale.device_streams import NoStream as NoStream
from polyscale.discovery.quiet import describe
from polyscale.errors import PluginError, UnsupportedError
from polyscale.interfaces.accelerator import Capabilities, Event, Finding, MemoryUse, Stream, Toolchain

if TYPE_CHECKING:
    import torch


class TorchAccelerator:
    """A device type that torch knows, in-tree or as PrivateUse1.

    A subclass sets the attributes of the Protocol and, where they apply:

    Attributes:
        modules: Python modules of the SDK; they must be installed, and ``activate`` imports them.
        requires: distributions of the SDK and their versions ("acme-torch>=2.1"), judged before anything is imported.
        install: how to install what is missing, for ``why_unavailable``.
        private: whether the device is torch's PrivateUse1, of which a process has one.
        own_streams: the device's module makes streams and events itself (``Stream``, ``Event``, ``stream``), rather
            than torch (``torch.Stream``).
    """

    name: str
    device_type: str
    auto: bool = True
    communications: tuple[str, ...] = ()
    visible_devices_variable: str = ""
    capabilities: Capabilities = Capabilities(dtypes=frozenset({"fp32"}))
    modules: tuple[str, ...] = ()
    requires: tuple[str, ...] = ()
    install: str = ""
    private: bool = False
    own_streams: bool = False

    # Availability. None of these registers a device or raises.

    def is_available(self) -> bool:
        """Return whether torch sees a device."""
        return self.why_unavailable() == ""

    def why_unavailable(self) -> str:
        """Say what is missing and what to install; "" when a device can be used."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch warns about old drivers; the reason is returned instead
                if found := sdk.misfit(self.requires):
                    return f"{found.why}. {found.fix}"
                module = self._find_module()
                if module is not None and module.is_available() and module.device_count() > 0:
                    return ""
                if owner := self._other_owner():
                    return f"torch has one slot for out-of-tree devices, and {owner!r} owns it in this process"
                return self.absence() or self._general_absence(module)
        except (Exception, SystemExit) as error:  # a half-installed SDK may raise anything, or exit
            return f"asking torch for {self.device_type} devices failed: {describe(error)}"

    def absence(self) -> str:
        """Explain why no device can be used, where the vendor knows better than the general text; "" otherwise."""
        return ""

    def activate(self) -> None:
        """Import the SDK's modules, which register the device with torch.

        Raises:
            UnsupportedError: the SDK is missing, of the wrong version, or fails or exits when it is imported; or
                another device type owns PrivateUse1.
        """
        label = f"Accelerator {self.name!r}"
        self._check_private_owner()
        if found := sdk.misfit(self.requires):
            raise UnsupportedError(label, why=found.why, fix=found.fix)
        try:
            sdk.import_modules(label, self.modules, fix=self.install)
        except PluginError as error:
            raise UnsupportedError(error.given, why=error.why, fix=error.fix) from error
        self._check_private_owner()

    # Devices

    def device_count(self) -> int:
        """Number of visible devices; 0 when there are none."""
        module = self._find_module()
        return int(module.device_count()) if module is not None else 0

    def device(self, index: int | None = None) -> torch.device:
        """The device of ``index``; of the current one when None.

        Raises:
            UnsupportedError: there is no such device.
        """
        import torch

        if index is None:
            return torch.device(self.device_type, self._module().current_device())
        self._check_index(index)
        return torch.device(self.device_type, index)

    def set_device(self, index: int) -> None:
        """Make ``index`` the current device of this process.

        Raises:
            UnsupportedError: there is no such device.
        """
        self._check_index(index)
        self._module().set_device(index)

    def synchronize(self) -> None:
        """Block until the current device's work is done."""
        self._module().synchronize()

    # Memory

    def memory(self) -> MemoryUse:
        """Bytes on the current device, as its allocator counts them.

        Raises:
            UnsupportedError: the device does not count memory, though it may declare that it does.
        """
        self._need(self.capabilities.memory_statistics, "Memory statistics")
        self._module()
        return keep_claim(self.name, "memory statistics", "asking for them", self._count_memory)

    def reset_peak_memory(self) -> None:
        """Start the peak anew (nothing to do where memory is not counted)."""
        if self.capabilities.memory_statistics:
            self._call("reset_peak_memory_stats")

    def empty_cache(self) -> None:
        """Give cached memory back to the device, where it has a cache."""
        empty = getattr(self._module(), "empty_cache", None)
        if empty is not None:
            empty()

    # Random numbers

    def manual_seed(self, seed: int) -> None:
        """Seed the generator of the current device."""
        self._module().manual_seed(seed)

    def rng_state(self) -> torch.Tensor:
        """State of the current device's generator (uint8, on the host)."""
        state: torch.Tensor = self._module().get_rng_state(self.device())
        return state.cpu()

    def set_rng_state(self, state: torch.Tensor) -> None:
        """Restore what ``rng_state`` gave."""
        self._module().set_rng_state(state.cpu(), self.device())

    # Streams and events

    def new_stream(self) -> Stream:
        """A queue of work on the current device; one that does nothing where the device has no streams."""
        if not self.capabilities.streams:
            return NoStream()
        self._module()
        return keep_claim(self.name, "streams", "making a stream", self._make_stream)

    def new_event(self) -> Event:
        """A marker on the current device; one that does nothing where the device has no streams."""
        if not self.capabilities.streams:
            return NoEvent()
        self._module()
        return keep_claim(self.name, "streams", "making an event", self._make_event)

    # The report

    def diagnose(self) -> list[Finding]:
        """Rows for the report: the devices, or why there are none. Vendors add driver, toolkit and compiler."""
        why = self.why_unavailable()
        if why:
            return [Finding("devices", "none", ok=False, fix=why)]
        count = self.device_count()
        names = [self._device_name(index) for index in range(count)]
        return [Finding("devices", f"{count}: {', '.join(names)}")]

    def toolchain(self) -> Toolchain | None:
        """The compiler for kernels; None where there is none."""
        return None

    # Inner parts

    def _find_module(self) -> Any:
        """The module that torch has for this device type, or None where this torch has none (yet)."""
        import torch

        try:
            return torch.get_device_module(self.device_type)
        except (RuntimeError, AttributeError):
            return None

    def _module(self) -> Any:
        module = self._find_module()
        if module is None or not module.is_available():
            raise UnsupportedError(f"Accelerator {self.name!r}", why=self.why_unavailable())
        return module

    def _count_memory(self) -> MemoryUse:
        return MemoryUse(
            allocated=int(self._call("memory_allocated")),
            reserved=int(self._call("memory_reserved")),
            peak=int(self._call("max_memory_allocated")),
            total=self._total_memory(),
        )

    def _make_stream(self) -> Stream:
        import torch

        if self.own_streams:
            return ModuleStream(self._module())
        stream: Any = torch.Stream(device=self.device())
        return cast("Stream", stream)

    def _make_event(self) -> Event:
        import torch

        if self.own_streams:
            return ModuleEvent(self._module())
        return cast("Event", torch.Event(device=self.device()))

    def _call(self, function: str) -> Any:
        """Call ``function`` of the device's module, or of ``torch.accelerator`` where the module has none."""
        import torch

        found = getattr(self._module(), function, None) or getattr(torch.accelerator, function)
        return found()

    def _total_memory(self) -> int:
        module = self._module()
        if hasattr(module, "mem_get_info"):
            return int(module.mem_get_info()[1])
        if hasattr(module, "get_device_properties"):
            return int(getattr(module.get_device_properties(module.current_device()), "total_memory", 0))
        return 0

    def _device_name(self, index: int) -> str:
        name = getattr(self._find_module(), "get_device_name", None)
        return str(name(index)) if name is not None else f"{self.device_type}:{index}"

    def _need(self, declared: bool, what: str) -> None:
        if not declared:
            raise UnsupportedError(f"{what} of accelerator {self.name!r}", why="The device does not declare them")

    def _check_index(self, index: int) -> None:
        count = self.device_count()
        if 0 <= index < count:
            return
        mask = env.device_mask(self.visible_devices_variable)
        masked = f" ({self.visible_devices_variable}={mask!r})" if mask is not None else ""
        valid = f"valid: 0 to {count - 1}" if count > 1 else ("valid: 0" if count else self.why_unavailable())
        raise UnsupportedError(
            f"{self.name} device {index}",
            why=f"{count} {'device is' if count == 1 else 'devices are'} visible{masked}; {valid}",
            fix=f"Start at most {count} ranks on this host" if count else "",
        )

    def _other_owner(self) -> str | None:
        """The other device type that owns PrivateUse1, which this one needs; None: there is none."""
        from polyscale import _torch

        owner = _torch.privateuse1_owner() if self.private else None
        return None if owner == self.device_type else owner

    def _check_private_owner(self) -> None:
        if owner := self._other_owner():
            raise UnsupportedError(
                f"Accelerator {self.name!r}",
                why=f"Torch has one slot for out-of-tree devices, and {owner!r} owns it in this process",
                fix=f"Choose accelerator {owner!r}, or uninstall the package that registers it",
            )

    def _general_absence(self, module: Any) -> str:
        import torch

        hint = f"; {self.install}" if self.install else ""
        if missing := sdk.missing_modules(self.modules):
            return f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed{hint}"
        if module is None and self.modules:
            off = env.autoload_off()
            remedy = "import it first" if off is None else f"unset TORCH_DEVICE_BACKEND_AUTOLOAD={off!r}"
            return f"{', '.join(self.modules)} is installed, but torch has not loaded it; {remedy}"
        if module is None:
            return f"this torch ({torch.__version__}) has no device type {self.device_type!r}{hint}"
        mask = env.device_mask(self.visible_devices_variable)
        if mask is not None:
            return f"torch sees no {self.device_type} device with {self.visible_devices_variable}={mask!r}{hint}"
        return f"torch ({torch.__version__}) sees no {self.device_type} device{hint}"
