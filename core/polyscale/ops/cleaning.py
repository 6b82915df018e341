"""Removing built kernels from the cache. They are built again when they are next needed.

Notable: only what was made here is touched (folders named by a build key below a folder with our lock file), so a cache
folder that holds other things too keeps them; and a build that is under way is left alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from polyscale.errors import BuildError
from polyscale.ops import cache
from polyscale.ops.locking import LOCK, locked


@dataclass(frozen=True)
class Cleaned:
    """What was removed.

    Attributes:
        folder: the cache.
        bytes: size of the files removed.
        modules: names of modules of which builds were removed.
        busy: why builds of others were left.
    """

    folder: Path
    bytes: int
    modules: tuple[str, ...]
    busy: tuple[str, ...]


def clean() -> Cleaned:
    """Remove every build from the cache; those of a module that another process is building now are left.

    Raises:
        BuildError: the cache cannot be written.
    """
    freed, modules, busy = 0, [], []
    for folder in cache.module_folders():
        if not (folder / LOCK).is_file():
            continue
        try:
            with locked(folder, f"Kernel module {folder.name}", wait=False):
                removed = cache.remove_builds(folder)
        except OSError as error:
            raise BuildError(
                f"Kernel cache {folder}", why=f"it cannot be removed: {error.strerror or error}"
            ) from error
        except BuildError as error:
            busy.append(str(error))
            continue
        freed += removed
        modules += [folder.name] if removed else []
    return Cleaned(cache.root(), freed, tuple(modules), tuple(busy))
