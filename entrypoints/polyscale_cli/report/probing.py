"""Trying one installed plugin: does it load, can it be used here.

Notable: whatever a plugin does while it is loaded or asked ends up as the reason in its row, never as an exception.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from polyscale.discovery import Installed, load, plugin_info
from polyscale.discovery.selecting import availability
from polyscale.errors import PluginError
from polyscale_cli.report.model import TorchFacts


@dataclass(frozen=True)
class Probe:
    """One plugin after it was tried.

    Attributes:
        entry: its entry point.
        made: the object it handed over; None when it could not be loaded.
        interface: interface version it was written for; "" when it could not be loaded.
        why: why it cannot be used; "" when it can.
    """

    entry: Installed
    made: Any = None
    interface: str = ""
    why: str = ""


def probe(entry: Installed, torch: TorchFacts) -> Probe:
    """Try one plugin; nothing is loaded where torch itself cannot be imported."""
    if torch.error:
        return Probe(entry, why=torch.error)
    interface = ""
    try:
        interface = ".".join(map(str, plugin_info(entry.kind, entry.name).interface_version))
        made = load(entry.kind, entry.name)
    except PluginError as error:
        return Probe(entry, interface=interface, why=_reason(error))
    return Probe(entry, made, interface, availability(entry.kind, entry.name, made))


def _reason(error: PluginError) -> str:
    """Cause and repair, without the plugin's own name, which its row has already; an ambiguity needs all of it."""
    if not error.why or "claimed by" in error.given:
        return str(error)
    return str(type(error)(error.why, fix=error.fix))
