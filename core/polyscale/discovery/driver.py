"""stevedore's ``DriverManager`` over our own scan.

Notable: stevedore's list of entry points comes from a file that it writes under the home directory; giving it the one
entry point that is wanted leaves that file out, in launched ranks too, and leaves nothing to resolve between two.
"""

from __future__ import annotations

from importlib.metadata import EntryPoint
from typing import Any

from stevedore.driver import DriverManager

from polyscale.discovery.catalogue import Installed


class OneDriver(DriverManager):  # type: ignore[type-arg, unused-ignore]
    """Finds and loads exactly one entry point."""

    def __init__(self, entry: Installed) -> None:
        self._entry_point = EntryPoint(entry.name, entry.value, entry.group)
        super().__init__(entry.group, entry.name, invoke_on_load=False)

    def list_entry_points(self) -> list[EntryPoint]:
        """Return the wanted entry point alone."""
        return [self._entry_point]


def load_entry_point(entry: Installed) -> Any:
    """Import what ``entry`` names and return it; whatever its module raises passes through."""
    return OneDriver(entry).driver
