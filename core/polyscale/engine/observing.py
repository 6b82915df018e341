"""Hands events to the observers on rank 0. An observer that raises is disabled and reported once."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from polyscale.discovery import installed, load
from polyscale.errors import PolyscaleError
from polyscale.hooks import PluginContext
from polyscale.interfaces.accelerator import Accelerator
from polyscale.interfaces.observer import Event, Observer

if TYPE_CHECKING:
    from polyscale.config import Config

log = logging.getLogger("polyscale")


class Observers:
    """The enabled observers of one engine."""

    def __init__(self, observers: list[Observer]) -> None:
        self._observers = observers
        self._disabled: list[Observer] = []

    @classmethod
    def load(cls, config: Config, accelerator: Accelerator, *, rank: int) -> Observers:
        """Load every installed observer that the configuration enables; on other ranks than 0 there is none."""
        found: list[Observer] = []
        if rank == 0:
            for entry in installed("observer"):
                options = dict(config.backends.options.get(entry.name, {}))
                context = PluginContext(entry.name, options, config, accelerator)
                try:
                    observer: Observer = load("observer", entry.name, context)
                    if observer.enabled():
                        found.append(observer)
                except PolyscaleError as error:
                    log.warning("observer %s is not used: %s", entry.name, error)
        return cls(found)

    def __bool__(self) -> bool:
        return bool(self._observers)

    def tell(self, event: Event) -> None:
        """Hand ``event`` to every observer."""
        for observer in list(self._observers):
            try:
                observer.on_event(event)
            except Exception as error:  # an observer must never end training
                log.warning("observer %s is disabled: %s: %s", observer.name, type(error).__name__, error)
                self._observers.remove(observer)
                self._disabled.append(observer)

    def close(self) -> None:
        """Close all observers."""
        for observer in (*self._observers, *self._disabled):
            try:
                observer.close()
            except Exception as error:
                log.warning("observer %s did not close: %s: %s", observer.name, type(error).__name__, error)
        self._observers, self._disabled = [], []
