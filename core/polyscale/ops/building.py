"""Building one module: ninja in a private folder, under the module's lock, published by rename.

Notable: only the holder of the lock builds, so what lies in other private folders is of the dead and is removed. A
build that another process ended while this one waited is taken, its failure too: ranks that start together build once.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path

from polyscale import env
from polyscale.ops import cache, lifeline
from polyscale.ops.cache import Built, Record
from polyscale.ops.failures import failure_in, failure_mark, last_failure
from polyscale.ops.locking import locked, unwritable
from polyscale.ops.ninja_file import ninja_file
from polyscale.ops.prerequisites import prerequisites
from polyscale.ops.recipe import Recipe, extension_file
from polyscale.ops.tools import Tools

logger = logging.getLogger("polyscale")
_VERSION_TIMEOUT_S = 10
_END_TIMEOUT_S = 10


def build(recipe: Recipe, tools: Tools, *, rejected: Record | None = None) -> Built:
    """Build a module, or take what another process has built in the meantime.

    Args:
        recipe: what to build.
        tools: compilers.
        rejected: record of a build that will not do; None: any will.

    Raises:
        BuildError: a source does not compile, ninja or pybind11 is missing, or the cache cannot be written.
    """
    module = recipe.module
    ninja = prerequisites(recipe)
    target = cache.folder(module) / recipe.build_key(tools)
    known = failure_mark(target)
    with locked(target.parent, f"Kernel module {module.name}") as waited:
        found = cache.in_folder(target, recipe)
        if found is not None and found.record != rejected:
            return found
        if waited and (failure := last_failure(recipe, target, other_than=known)) is not None:
            raise failure
        cache.remove_leftovers(target.parent)
        try:
            with _private_folder(target.parent) as private:
                return _build(recipe, tools, ninja, private, target)
        except OSError as error:
            raise unwritable(target.parent, error) from error


def _build(recipe: Recipe, tools: Tools, ninja: str, private: Path, target: Path) -> Built:
    module, started = recipe.module, time.monotonic()
    count = f"{len(recipe.sources)} source{'s' if len(recipe.sources) > 1 else ''}"
    logger.warning("Building kernel module %s (%s, once; it is kept in %s)", module.name, count, target.parent)
    (private / "build.ninja").write_text(ninja_file(recipe, tools), encoding="utf-8")
    code = _run_ninja(ninja, private)
    seconds = time.monotonic() - started
    if code != 0 or not (private / recipe.file).is_file():  # a compiler may end well and write nothing
        raise failure_in(module, cache.keep_log(private, target))
    file = extension_file(module, secrets.token_hex(4))
    size, sha256 = cache.measure((private / recipe.file).replace(private / file))
    record = Record(
        module=module.name,
        source_key=recipe.source_key,
        file=file,
        size=size,
        sha256=sha256,
        built=datetime.now(timezone.utc).isoformat(),
        seconds=round(seconds, 2),
        compilers=[f"{each.compiler} ({_version(each.compiler)})" for each in (tools.host, tools.device) if each],
        files=recipe.digests,
        flags=[*module.flags, *module.link_flags],
    )
    built = cache.publish(private, target, recipe, record)
    logger.info("Built kernel module %s in %.1f s", module.name, seconds)
    return built


def _run_ninja(ninja: str, private: Path) -> int:
    """Run ninja to its end; when this process is interrupted or dies, ninja and its compilers end too."""
    command = [ninja, "-v", "-j", str(_usable_cores())]
    if sys.executable:
        command = [sys.executable, "-I", "-S", lifeline.__file__, *command]
    with (private / cache.LOG).open("wb") as log:
        process = subprocess.Popen(
            command,
            cwd=private,
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=env.compiler_environment(private),
            start_new_session=True,  # Ctrl-C reaches this process alone, which ends the others in order
        )
        try:
            return process.wait()
        finally:
            if process.stdin is not None:
                process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_END_TIMEOUT_S)


@contextlib.contextmanager
def _private_folder(module_folder: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(
        prefix=f"{cache.PRIVATE}{os.getpid()}-", dir=module_folder, ignore_cleanup_errors=True
    ) as folder:
        yield Path(folder)


def _version(compiler: str) -> str:
    try:
        done = subprocess.run([compiler, "--version"], capture_output=True, timeout=_VERSION_TIMEOUT_S, check=False)
    except (OSError, subprocess.SubprocessError):
        return "version unknown"
    return (done.stdout.decode(errors="replace").splitlines() or ["version unknown"])[0]


def _usable_cores() -> int:
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else (os.cpu_count() or 1)
