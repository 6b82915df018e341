"""Checks made on metadata before a plugin's module is imported.

Notable: a module built for another torch may end the process while it is imported, which nothing can catch; but its
distribution says which torch it needs. The plugin's own requirements and those of the distributions it requires
directly are read; deeper ones are pip's affair. Nearly all ask for ``torch>=some.version``: those are compared here,
and ``packaging``, whose import takes longer than all else, is asked about the others.
"""

from __future__ import annotations

import re
import sys
from functools import lru_cache
from importlib import metadata
from typing import TYPE_CHECKING

from polyscale.discovery.catalogue import Installed, canonical
from polyscale.errors import PluginError

if TYPE_CHECKING:
    from packaging.requirements import Requirement

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*")
_AT_LEAST = re.compile(r"torch ?>= ?(\d+(?:\.\d+)*)")


def check_torch(entry: Installed) -> None:
    """Compare the torch that the plugin's distribution was made for with the one installed.

    Raises:
        PluginError: they do not fit.
    """
    torch_version = _torch_version()
    if torch_version is None or _plainly_fits(entry.distribution, torch_version):
        return
    for owner, needed in _torch_requirements(entry.distribution):
        if needed.specifier.contains(torch_version, prereleases=True):
            continue
        raise PluginError(
            entry.label,
            why=f"{owner} requires {needed.name}{needed.specifier}, and torch {torch_version} is installed",
            fix=f"Install a release for this torch (`pip install --upgrade {owner}`), or remove it "
            f"(`pip uninstall {entry.distribution}`)",
        )


def _torch_version() -> str | None:
    """Version of torch: its own word where it is imported, since its metadata takes longer to read."""
    stated = getattr(sys.modules.get("torch"), "__version__", None)
    return version_of("torch") if stated is None else str(stated)


@lru_cache(maxsize=64)
def version_of(distribution: str) -> str | None:
    """Version of an installed distribution; None when it is absent. Imports nothing."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def requirements_of(distribution: str) -> list[Requirement]:
    """What an installed distribution requires, extras included; [] when it is absent. Unreadable lines are left out."""
    from packaging.requirements import InvalidRequirement, Requirement

    found = []
    for line in _required(distribution):
        try:
            found.append(Requirement(line))
        except InvalidRequirement:
            continue
    return found


def distribution_of(requirement: str) -> str:
    """Name of the distribution that a requirement names; "" where it names none."""
    found = _NAME.match(requirement)
    return found.group() if found is not None else ""


def _required(distribution: str) -> tuple[str, ...]:
    """What an installed distribution requires, as text; empty when it is absent."""
    try:
        return tuple(metadata.requires(distribution) or ())
    except metadata.PackageNotFoundError:
        return ()


@lru_cache(maxsize=256)
def _lines(distribution: str) -> tuple[str, ...]:
    """The same; kept, since most plugins require the same few distributions."""
    return _required(distribution)


@lru_cache(maxsize=64)
def _plainly_fits(distribution: str, torch_version: str) -> bool:
    """Whether all that is required of torch, extras aside, is "at least" an older version; if not, it may fit still."""
    found = re.match(r"\d+(?:\.\d+)*(?=$|\+)", torch_version)
    if found is None:  # a pre-release orders otherwise
        return False
    release = _numbers(found.group())
    owners = [distribution, *(name for name, _ in _named(distribution) if name != "torch")]
    needed = [line for owner in owners for name, line in _named(owner) if name == "torch"]
    least = [_AT_LEAST.fullmatch(line) for line in needed]
    return all(each is not None and _numbers(each.group(1)) <= release for each in least)


def _named(distribution: str) -> list[tuple[str, str]]:
    """(name, line) of what a distribution requires without extras, other markers not judged."""
    lines = (line for line in _lines(distribution) if "extra" not in line.partition(";")[2])
    return [(canonical(name), line) for line in lines if (name := distribution_of(line))]


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


@lru_cache(maxsize=64)
def _torch_requirements(distribution: str) -> tuple[tuple[str, Requirement], ...]:
    """(owner, requirement on torch) of the distribution and of those that it requires."""
    owners = [distribution]
    owners += [needed.name for needed in _active(distribution) if canonical(needed.name) != "torch"]
    return tuple((owner, needed) for owner in owners for needed in _active(owner) if canonical(needed.name) == "torch")


@lru_cache(maxsize=256)
def _active(distribution: str) -> tuple[Requirement, ...]:
    """What it requires without extras; kept, since most plugins require the same few distributions."""
    found = requirements_of(distribution)
    return tuple(needed for needed in found if needed.marker is None or needed.marker.evaluate({"extra": ""}))
