"""Watchdog (names only; the body follows)."""

from __future__ import annotations

from polyscale.control.agreement import Control


class Phase:
    """A stretch of work of the main thread; a context manager."""

    def __enter__(self) -> Phase:
        return self

    def __exit__(self, *exc: object) -> None:
        return None


class Watchdog:
    """Ends this process when another rank has failed or is gone."""

    def __init__(self, control: Control) -> None:
        self.control = control

    def start(self) -> None:
        """Begin to watch."""

    def stop(self) -> None:
        """Watch no longer."""

    def phase(self, name: str) -> Phase:
        """Say what the main thread does."""
        return Phase()

    def note(self, detail: str) -> None:
        """Say at which module or unit."""

    def failed(self, exception: BaseException) -> None:
        """Tell the other ranks that this one raised."""
