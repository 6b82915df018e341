"""Streams and events: those that do nothing, and those that a device's module makes itself.

Notable: torch makes streams of in-tree devices (``torch.Stream``). An out-of-tree module has a ``Stream`` of its own,
which may not be a context manager; the module's ``stream(...)`` is.
"""

from __future__ import annotations

from typing import Any


class NoStream:
    """The stream of a device that has none: work is done when its call returns."""

    def __enter__(self) -> NoStream:
        return self

    def __exit__(self, *exc: object) -> None:
        return None

    def synchronize(self) -> None:
        """Return at once."""

    def wait_stream(self, other: Any) -> None:
        """Return at once."""


class NoEvent:
    """The event of a device that has no streams."""

    def record(self, stream: Any = None) -> None:
        """Return at once."""

    def synchronize(self) -> None:
        """Return at once."""


class ModuleStream:
    """A stream made by a device's module (``module.Stream``), and entered by ``module.stream``.

    Attributes:
        raw: the module's own stream.
    """

    def __init__(self, module: Any) -> None:
        """``module``: the device's module."""
        self._module = module
        self.raw: Any = module.Stream()
        self._entered: list[Any] = []

    def __enter__(self) -> ModuleStream:
        context = self._module.stream(self.raw)
        context.__enter__()
        self._entered.append(context)
        return self

    def __exit__(self, *exc: object) -> None:
        self._entered.pop().__exit__(*(exc or (None, None, None)))

    def synchronize(self) -> None:
        """Block the host until the queued work is done."""
        self.raw.synchronize()

    def wait_stream(self, other: Any) -> None:
        """Let later work here wait for the work queued on ``other`` so far."""
        self.raw.wait_stream(_raw(other))


class ModuleEvent:
    """An event made by a device's module (``module.Event``).

    Attributes:
        raw: the module's own event.
    """

    def __init__(self, module: Any) -> None:
        """``module``: the device's module."""
        self.raw: Any = module.Event()

    def record(self, stream: Any = None) -> None:
        """Put the marker behind the work queued so far, on ``stream`` or the current one."""
        if stream is None:
            self.raw.record()
        else:
            self.raw.record(_raw(stream))

    def synchronize(self) -> None:
        """Block the host until the marker is reached."""
        self.raw.synchronize()


def _raw(stream: Any) -> Any:
    return stream.raw if isinstance(stream, ModuleStream) else stream
