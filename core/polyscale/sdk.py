"""A vendor's SDK: judged by its metadata before it is imported, and imported without letting it end the process.

Notable: an SDK made for another torch may crash where nothing can catch it, but its distribution says which torch it
needs. What is wrong with it comes as a cause and a remedy, so that asking (which never raises) and using (which does)
say the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module, metadata
from importlib.util import find_spec

from polyscale.discovery.catalogue import canonical
from polyscale.discovery.quiet import run_plugin_code
from polyscale.discovery.requirements import distribution_of, requirements_of


@dataclass(frozen=True)
class Misfit:
    """Why an SDK cannot be used, and what to do about it."""

    why: str
    fix: str


def missing_modules(modules: Sequence[str]) -> list[str]:
    """Those of ``modules`` that are not installed; nothing is imported, so of a dotted name the first part counts."""
    return [name for name in modules if find_spec(name.partition(".")[0]) is None]


def misfit(requirements: Sequence[str]) -> Misfit | None:
    """What is wrong with the installed SDK, by metadata alone; None where it fits, is absent, or says nothing.

    Args:
        requirements: distributions and versions that are needed ("acme-torch>=2.1").
    """
    found = {line: version for line in requirements if (version := _version(distribution_of(line))) is not None}
    if not found:
        return None
    from packaging.requirements import Requirement  # its import takes longer than all else, and most have no SDK

    torch_version = _version("torch")
    for line, version in found.items():
        needed = Requirement(line)
        if not needed.specifier.contains(version, prereleases=True):
            return Misfit(
                f"{needed.name} {version} is installed, and {needed.name}{needed.specifier} is needed",
                f"Run `pip install --upgrade '{needed.name}{needed.specifier}'`",
            )
        for other in requirements_of(needed.name):
            if canonical(other.name) != "torch" or torch_version is None:
                continue
            applies = other.marker is None or other.marker.evaluate({"extra": ""})
            if applies and not other.specifier.contains(torch_version, prereleases=True):
                return Misfit(
                    f"{needed.name} {version} requires torch{other.specifier}, and torch {torch_version} is installed",
                    f"Install a release of {needed.name} for this torch, or torch{other.specifier}",
                )
    return None


def import_modules(label: str, modules: Sequence[str], *, fix: str) -> None:
    """Import ``modules`` with stdout redirected.

    Args:
        label: whose SDK it is, for errors.
        modules: what is imported, in this order.
        fix: what to do when that fails.

    Raises:
        PluginError: a module is missing, raised while it was imported, or called ``exit``.
    """
    for module in modules:

        def load(module: str = module) -> None:
            import_module(module)

        run_plugin_code(label, f"Importing {module}", load, fix=fix)


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
