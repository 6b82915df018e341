"""What a failed build leaves: the compiler's whole output, of which one line says what is wrong.

Notable: its log stands in the cache under the build's key until a build succeeds, so a later process knows of the
failure without building: a rank that waited does not repeat it, and the report shows it. Starting anew does try again.
"""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

from polyscale.errors import BuildError
from polyscale.interfaces.op import KernelModule
from polyscale.ops import cache
from polyscale.ops.recipe import Recipe

FailureMark = tuple[int, int, int]
_ERRORS = (
    re.compile(r"^\S.*?[:(]\d+[:)].*\berror\b.*$", re.MULTILINE),  # path:line:column: error, path(line): error
    re.compile(r"^.*(?:\berror: |undefined reference|cannot find -l|undefined symbol).*$", re.MULTILINE),
)


def first_error(log: str) -> str:
    """The line of a compiler's output that says what is wrong."""
    for pattern in _ERRORS:
        if found := pattern.search(log):
            return found.group().strip()
    lines = [
        line.strip() for line in log.splitlines() if line.strip() and not line.startswith(("ninja:", "FAILED:", "["))
    ]
    return lines[-1] if lines else "the compiler says nothing"


def failure_in(module: KernelModule, log: Path) -> BuildError:
    """The error of the failed build whose output is in ``log``."""
    text = log.read_text(encoding="utf-8", errors="replace")
    return BuildError(
        f"Kernel module {module.name!r} does not compile",
        why=first_error(text),
        fix=f"The whole output of the compiler is in {log}",
    )


def last_failure(recipe: Recipe, target: Path, *, other_than: FailureMark | None = None) -> BuildError | None:
    """How the last build in the folder ``target`` of the cache failed; None where it did not.

    Args:
        recipe: what is built there.
        target: folder of its build key.
        other_than: the failure that is known already, and does not count.
    """
    mark = failure_mark(target)
    if mark is None or mark == other_than:
        return None
    with contextlib.suppress(OSError):
        return failure_in(recipe.module, target / cache.FAILED_LOG)
    return None


def failure_mark(target: Path) -> FailureMark | None:
    """What tells the failure that lies in ``target`` from others, by no clock of this host; None: there is none."""
    try:
        found = (target / cache.FAILED_LOG).stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size
