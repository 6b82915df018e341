"""What is installed, from the metadata of distributions alone.

Notable: each distribution is read by itself, so that one with an unreadable ``entry_points.txt`` cannot hide the
others; the scan is kept as long as ``sys.path`` and the times of its folders stay the same; nothing is written to disk.
"""

from __future__ import annotations

import logging
import re
import sys
from dataclasses import dataclass
from functools import lru_cache
from importlib import metadata
from pathlib import Path

from polyscale.errors import PluginError, nearest
from polyscale.kinds import KINDS, Kind

logger = logging.getLogger("polyscale")
_PREFIX = "polyscale."


@dataclass(frozen=True)
class Installed:
    """One entry point.

    Attributes:
        kind: "accelerator", "optimizer", ... (the group without ``polyscale.``).
        name: the name users select.
        distribution: name of the distribution that provides it.
        version: version of that distribution.
        value: ``module:class``.
        group: entry-point group.
    """

    kind: str
    name: str
    distribution: str
    version: str
    value: str
    group: str

    @property
    def label(self) -> str:
        """How errors name it: kind, name, distribution and version."""
        return f"{spoken(self.kind)} {self.name!r} ({self.distribution} {self.version})"


def kind_of(kind: str) -> Kind:
    """Return the :class:`Kind` called ``kind``.

    Raises:
        PluginError: there is no such kind.
    """
    if kind in KINDS:
        return KINDS[kind]
    near = nearest(kind, KINDS)
    hint = f"Did you mean {near!r}? " if near else ""
    raise PluginError(f"No kind of plugin {kind!r}", fix=f"{hint}Kinds: {', '.join(KINDS)}")


def installed(kind: str) -> list[Installed]:
    """List the entry points of group ``polyscale.<kind>``, sorted by name; imports nothing.

    A name that two distributions claim is listed twice; loading it is an error. ``kind`` may also name a group that
    holds no plugins, such as ``config``.
    """
    return [entry for entry in _scan(_fingerprint()) if entry.kind == kind]


def spoken(kind: str) -> str:
    """The kind at the start of a sentence."""
    return kind.upper() if len(kind) == 2 else kind.capitalize()


def canonical(distribution: str) -> str:
    """Name of a distribution in its normal form (PEP 503)."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


def _fingerprint() -> tuple[tuple[str, int], ...]:
    return tuple((entry, _modified(entry)) for entry in sys.path)


def _modified(entry: str) -> int:
    try:
        return Path(entry or ".").stat().st_mtime_ns
    except OSError:
        return -1


@lru_cache(maxsize=4)
def _scan(fingerprint: tuple[tuple[str, int], ...]) -> tuple[Installed, ...]:
    """Read every distribution once. The first on ``sys.path`` hides later ones of the same name, as imports do."""
    found: list[Installed] = []
    seen: set[str] = set()
    for distribution in metadata.distributions():
        try:
            entries = _entries(distribution)
        except Exception as error:  # somebody else's broken metadata
            logger.debug("Unreadable metadata of a distribution: %s", error)
            continue
        if entries and canonical(entries[0].distribution) not in seen:
            seen.add(canonical(entries[0].distribution))
            found += entries
    return tuple(sorted(found, key=lambda entry: (entry.kind, entry.name, entry.distribution)))


def _entries(distribution: metadata.Distribution) -> list[Installed]:
    if _PREFIX not in (distribution.read_text("entry_points.txt") or ""):
        return []
    stated = distribution.metadata  # parsed at each access
    name, version = stated["Name"] or "unknown", stated["Version"]
    return [
        Installed(entry.group.removeprefix(_PREFIX), entry.name, name, version, entry.value, entry.group)
        for entry in distribution.entry_points
        if entry.group.startswith(_PREFIX)
    ]
