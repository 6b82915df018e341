"""Checks made on metadata before a plugin's module is imported.

Notable: a module built for another torch may end the process while it is imported, which nothing can catch; but its
distribution says which torch it needs. The plugin's own requirements and those of the distributions it requires
directly are read; deeper ones are pip's affair.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from importlib import metadata

from packaging.requirements import InvalidRequirement, Requirement

from polyscale.discovery.catalogue import Installed, canonical
from polyscale.errors import PluginError


def check_torch(entry: Installed) -> None:
    """Compare the torch that the plugin's distribution was made for with the one installed.

    Raises:
        PluginError: they do not fit.
    """
    torch_version = version_of("torch")
    if torch_version is None:
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


@lru_cache(maxsize=64)
def version_of(distribution: str) -> str | None:
    """Version of an installed distribution; None when it is absent. Imports nothing."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def requirements_of(distribution: str) -> list[Requirement]:
    """What an installed distribution requires, extras included; [] when it is absent. Unreadable lines are left out."""
    try:
        lines = metadata.requires(distribution) or []
    except metadata.PackageNotFoundError:
        return []
    found = []
    for line in lines:
        try:
            found.append(Requirement(line))
        except InvalidRequirement:
            continue
    return found


@lru_cache(maxsize=64)
def _torch_requirements(distribution: str) -> tuple[tuple[str, Requirement], ...]:
    """(owner, requirement on torch) of the distribution and of those that it requires."""
    owners = [distribution]
    owners += [needed.name for needed in _active(distribution) if canonical(needed.name) != "torch"]
    return tuple((owner, needed) for owner in owners for needed in _active(owner) if canonical(needed.name) == "torch")


def _active(distribution: str) -> Iterator[Requirement]:
    for needed in requirements_of(distribution):
        if needed.marker is None or needed.marker.evaluate({"extra": ""}):
            yield needed
