"""Whether a module has been built, and if not whether it could be. Builds and imports no extension."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from polyscale.errors import BuildError
from polyscale.interfaces.op import KernelModule
from polyscale.ops import cache
from polyscale.ops.failures import last_failure
from polyscale.ops.locking import refusal
from polyscale.ops.prerequisites import prerequisites
from polyscale.ops.recipe import recipe
from polyscale.ops.tools import ToolMissingError, Tools

State = Literal["prebuilt", "built", "not built", "cannot build"]


@dataclass(frozen=True)
class ModuleStatus:
    """State of a module.

    Attributes:
        state: "prebuilt": its wheel has a build that fits; "built": the cache has one; else whether one can be made.
        why: why it cannot be built; "" otherwise.
        fix: what to do.
        path: the extension's file, where there is one.
        failed: cannot build: it has been tried, and failed; perhaps while this process was starting.
    """

    state: State
    why: str = ""
    fix: str = ""
    path: Path | None = None
    failed: bool = False


def status(module: KernelModule) -> ModuleStatus:
    """Look whether ``module`` has been built for the sources, the compiler and the Python of this process."""
    try:
        wanted = recipe(module)
    except BuildError as error:
        return ModuleStatus("cannot build", error.why or error.given, error.fix)
    if (found := cache.prebuilt(wanted)) is not None:
        return ModuleStatus("prebuilt", path=found.path)
    tools: Tools | None = None
    missing: ToolMissingError | None = None
    try:
        tools = wanted.tools()
        prerequisites(wanted)
    except ToolMissingError as error:
        missing = error
    key = wanted.build_key(tools) if tools is not None else None
    found = cache.cached(wanted, key)
    if found is None and missing is not None:
        found = cache.cached(wanted, None)
    if found is not None:
        return ModuleStatus("built", path=found.path)
    if missing is not None:
        return ModuleStatus("cannot build", missing.why, missing.fix)
    if key is not None and (failure := last_failure(wanted, cache.folder(module) / key)) is not None:
        return ModuleStatus("cannot build", failure.why, failure.fix, failed=True)
    if (refused := refusal(cache.folder(module))) is not None:
        return ModuleStatus("cannot build", f"{refused.given}: {refused.why}", refused.fix)
    return ModuleStatus("not built", fix=f"Run `scale build {module.name}`, or it is built at first use")
