"""Names of new plugins: what may be taken, and what is made of it.

Notable: one name gives all others. ``acme`` becomes the distribution ``acme-polyscale`` (``polyscale-...`` is for
polyscale's own), the package ``acme_polyscale`` and classes that begin with ``Acme``.
"""

from __future__ import annotations

import keyword
import re
from dataclasses import dataclass
from importlib import metadata

from polyscale.discovery import installed
from polyscale.discovery.missing import published
from polyscale.errors import PolyscaleError

_NAME = re.compile(r"[a-z][a-z0-9_]*")


@dataclass(frozen=True)
class Names:
    """What a new plugin is called.

    Attributes:
        kind: its kind ("optimizer").
        name: what configurations call it.
    """

    kind: str
    name: str

    @property
    def distribution(self) -> str:
        """Name of the distribution, and of its folder."""
        return f"{self.name.replace('_', '-')}-polyscale"

    @property
    def package(self) -> str:
        """Name of what is imported."""
        return f"{self.name}_polyscale"

    @property
    def camel(self) -> str:
        """Beginning of the names of classes."""
        return "".join(word[:1].upper() + word[1:] for word in self.name.split("_"))


def checked_names(kind: str, name: str) -> Names:
    """Names for a plugin ``name`` of ``kind``.

    Raises:
        PolyscaleError: it cannot be a name, or it is taken.
    """
    given = f"Name {name!r} for a new {kind}"
    if not _NAME.fullmatch(name):
        why = "A name is lower-case letters, digits and underscores, and begins with a letter"
        raise PolyscaleError(given, why=why, fix=_instead(name))
    if keyword.iskeyword(name):
        raise PolyscaleError(given, why="It is a word of the Python language", fix=f"Take {name}_{kind}, for instance")
    if name.startswith("polyscale"):
        raise PolyscaleError(given, why="Names that begin so are polyscale's own", fix="Name it after yourself")
    if owners := _owners(kind, name):
        raise PolyscaleError(given, why=f"{' and '.join(owners)} provides it", fix="Take another name")
    if name in (offered := published(kind)):
        raise PolyscaleError(given, why=f"{offered[name]} provides it", fix="Take another name")
    names = Names(kind, name)
    if version := _installed(names.distribution):
        why = f"its distribution would be {names.distribution}, and {names.distribution} {version} is installed"
        raise PolyscaleError(given, why=why, fix="Take another name, or add the entry point to that distribution")
    return names


def _owners(kind: str, name: str) -> list[str]:
    """Distributions that provide plugin ``name``; of kind op also those whose library has an operator of that name."""
    found = [entry for entry in installed(kind) if entry.name == name]
    if kind == "op":
        from polyscale.ops.libraries import libraries

        found += [library.entry for library in libraries() if name in {op.name for op in library.ops}]
    return list(dict.fromkeys(f"{entry.distribution} {entry.version}" for entry in found))


def _installed(distribution: str) -> str:
    """Version of a distribution; "" where it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""


def _instead(name: str) -> str:
    near = re.sub(r"[^a-z0-9]+", "_", re.sub(r"([a-z])([A-Z])", r"\1_\2", name).lower()).strip("_")
    return f"Take {near!r}, for instance" if _NAME.fullmatch(near) else "Take a name such as 'acme'"
