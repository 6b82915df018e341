"""Importing a module's extension: from its wheel, from the cache, or built now.

Notable: an extension stays imported for the life of the process, and a failure is not tried again until what it depends
on has changed. A build that cannot be imported (another Python, a damaged file) is built anew, once.
"""

from __future__ import annotations

import logging
import threading
from copy import copy
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import util
from importlib.machinery import ExtensionFileLoader
from types import ModuleType

from polyscale.errors import BuildError
from polyscale.interfaces.op import KernelModule
from polyscale.ops import cache
from polyscale.ops.cache import Built, Record
from polyscale.ops.recipe import Recipe, recipe
from polyscale.ops.tools import ToolMissingError, Tools

logger = logging.getLogger("polyscale")


@dataclass
class _Process:
    """What this process has imported, and what failed in it."""

    lock: threading.RLock = field(default_factory=threading.RLock)
    imported: dict[KernelModule, ModuleType] = field(default_factory=dict)
    failed: dict[tuple[str, str], BuildError] = field(default_factory=dict)


@lru_cache(maxsize=1)
def _process() -> _Process:
    return _Process()


def load_module(module: KernelModule) -> ModuleType:
    """Import the extension of ``module``: the build in its wheel, in the cache, or one made now.

    Raises:
        BuildError: it cannot be built here, or what was built cannot be imported.
    """
    process = _process()
    with process.lock:
        if module not in process.imported:
            process.imported[module] = _load(module, process.failed)
        return process.imported[module]


def ensure_built(module: KernelModule, *, force: bool = False) -> Built:
    """Build ``module`` unless the cache has it; imports nothing, and looks at no wheel.

    Args:
        module: what to build.
        force: whether to build although there is a build.

    Raises:
        BuildError: it cannot be built.
    """
    from polyscale.ops.building import build

    wanted = recipe(module)
    tools = wanted.tools()
    found = cache.cached(wanted, wanted.build_key(tools))
    if found is not None and not force:
        return found
    return build(wanted, tools, rejected=found.record if found is not None else None)


def _load(module: KernelModule, failed: dict[tuple[str, str], BuildError]) -> ModuleType:
    wanted = recipe(module)
    ready, _ = _try_import(module, cache.prebuilt(wanted))
    if ready is not None:
        return ready
    try:
        tools: Tools | None = wanted.tools()
        missing = None
    except ToolMissingError as error:
        tools, missing = None, error
    key = wanted.build_key(tools) if tools is not None else None
    ready, rejected = _try_import(module, cache.cached(wanted, key))
    if ready is not None:
        return ready
    what = (module.name, key or wanted.source_key)
    if what in failed:
        raise copy(failed[what])  # each time anew: an error grows by the frames that it passes
    try:
        if tools is None:
            assert missing is not None
            raise missing
        return _built_now(wanted, tools, rejected)
    except ToolMissingError as error:
        ready, _ = _try_import(module, cache.cached(wanted, None))
        if ready is not None:
            return ready
        failed[what] = copy(error)
        raise
    except BuildError as error:
        failed[what] = copy(error)
        raise


def _try_import(module: KernelModule, found: Built | None) -> tuple[ModuleType | None, Record | None]:
    """The extension of a build; where there is none, or it cannot be imported, None and the build's record."""
    if found is None:
        return None, None
    try:
        return _import(module, found), None
    except ImportError as error:
        logger.info("Kernel module %s: %s cannot be imported (%s)", module.name, found.path, error)
        return None, found.record


def _built_now(wanted: Recipe, tools: Tools, rejected: Record | None) -> ModuleType:
    from polyscale.ops.building import build  # what builds is not imported where nothing is built

    built = build(wanted, tools, rejected=rejected)
    try:
        return _import(wanted.module, built)
    except ImportError as error:
        why = f"what was built cannot be imported: {error}"
        raise BuildError(f"Kernel module {wanted.module.name!r}", why=why) from error


def _import(module: KernelModule, built: Built) -> ModuleType:
    if module.torch_headers:
        import torch  # noqa: F401  its libraries must be there before the extension is
    loader = ExtensionFileLoader(module.name, str(built.path))
    spec = util.spec_from_file_location(module.name, built.path, loader=loader)
    assert spec is not None
    try:
        extension = util.module_from_spec(spec)
        loader.exec_module(extension)
    except ImportError:
        raise
    except Exception as error:  # its own code has run, so another build would do the same
        why = f"it fails while it is imported: {type(error).__name__}: {error}"
        raise BuildError(f"Kernel module {module.name!r}", why=why) from error
    return extension
