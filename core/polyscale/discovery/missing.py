"""The error for a name that nothing installed provides.

Notable: which distribution would provide it is read from the extras of polyscale's own distributions, so no vendor is
named here, and a name somebody made up is never turned into a ``pip install`` of a stranger's package.
"""

from __future__ import annotations

from polyscale.discovery.catalogue import canonical, installed
from polyscale.errors import PluginError, nearest

_OWN = ("polyscale-core", "polyscale")
_BACKEND = "polyscale-backend-"
_EVERYTHING = "'polyscale[all]'"


def unknown(kind: str, name: str) -> PluginError:
    """Say that ``name`` is not installed, the nearest name, what is installed, and the line to run."""
    names = sorted({entry.name for entry in installed(kind)})
    offered = published(kind)
    near = name if name in offered else nearest(name, [*names, *offered])
    parts = []
    if near is not None and near != name:
        parts.append(f"Did you mean {near!r}?")
    parts.append(f"Installed: {', '.join(names) or 'none'}.")
    if near in offered and near not in names:
        parts.append(f"Run `pip install {offered[near]}`")
    else:
        parts.append(f"More: `pip install {_EVERYTHING}`")
    return PluginError(f"No {kind} {name!r}", fix=" ".join(parts))


def published(kind: str) -> dict[str, str]:
    """Plugins that polyscale itself publishes: name -> distribution (extras with exactly one requirement)."""
    from polyscale.discovery.requirements import requirements_of

    extras: dict[str, set[str]] = {}
    for own in _OWN:
        for needed in requirements_of(own):
            for extra in _extras(str(needed.marker or "")):
                extras.setdefault(extra, set()).add(canonical(needed.name))
    single = {extra: found.pop() for extra, found in extras.items() if len(found) == 1}
    return {
        extra: dist
        for extra, dist in single.items()
        if extra != "all" and dist.startswith(_BACKEND) == (kind == "accelerator")
    }


def _extras(marker: str) -> list[str]:
    """Values of ``extra == "..."`` in a marker."""
    words = marker.replace("'", '"').split('"')
    return [
        value for before, value in zip(words[::2], words[1::2], strict=False) if before.strip().endswith("extra ==")
    ]
