"""Where builds lie: ``<cache folder>/kernels/<module>/<build key>/``, an extension and a record of what made it.

Notable: a file is loaded only when its size and SHA-256 are those of its record, because mapping a truncated one can
end the process. Each build has a file name of its own, since a process that has mapped a file gets that one again under
its path, whatever is there by then; the record names it, and is put in place last, by a rename. Nothing here writes
while it looks, so a read-only cache serves.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from polyscale import env
from polyscale.interfaces.op import KernelModule
from polyscale.ops.recipe import Recipe

RECORD = "build.json"
LOG = "build.log"
FAILED_LOG = "failed.log"
PRIVATE = ".build-"
_KEY = re.compile(r"[0-9a-f]{24}")


@dataclass(frozen=True)
class Record:
    """What an extension was built from, as kept beside it.

    Attributes:
        module: name of the module.
        source_key: of its recipe.
        file: name of the extension's file.
        size, sha256: of the extension's file.
        built: when, ISO 8601.
        seconds: how long it took.
        compilers: path and first line of ``--version`` of each.
        files: file -> SHA-256.
        flags: of the module.
    """

    module: str
    source_key: str
    file: str
    size: int
    sha256: str
    built: str = ""
    seconds: float = 0.0
    compilers: list[str] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)
    flags: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Built:
    """An extension whose file is as its record says."""

    path: Path
    record: Record


def root() -> Path:
    """Folder of all built kernels."""
    return env.cache_folder() / "kernels"


def folder(module: KernelModule) -> Path:
    """Folder of the builds of ``module``."""
    return root() / module.name


def prebuilt(recipe: Recipe) -> Built | None:
    """The build in the module's wheel, where there is one for these sources and this Python."""
    place = recipe.module.prebuilt
    if place is None:
        return None
    return _read(place / f"{recipe.module.name}.json", recipe)


def cached(recipe: Recipe, build_key: str | None) -> Built | None:
    """The build in the cache.

    Args:
        recipe: what is wanted.
        build_key: its build key; None: there is no compiler, so the newest of these sources will do.
    """
    if build_key is not None:
        return in_folder(folder(recipe.module) / build_key, recipe)
    found = [in_folder(place, recipe) for place in _builds(folder(recipe.module))]
    return max(filter(None, found), key=lambda built: built.record.built, default=None)


def in_folder(place: Path, recipe: Recipe) -> Built | None:
    """The build in one folder of the cache."""
    return _read(place / RECORD, recipe)


def write_record(path: Path, record: Record) -> None:
    """Write ``record`` as JSON."""
    path.write_text(json.dumps(asdict(record), indent=1) + "\n", encoding="utf-8")


def measure(path: Path) -> tuple[int, str]:
    """Size and SHA-256 of a file."""
    data = path.read_bytes()
    return len(data), hashlib.sha256(data).hexdigest()


def publish(private: Path, target: Path, recipe: Recipe, record: Record) -> Built:
    """Move a finished build from its private folder to ``target``, and remove what it replaces."""
    write_record(private / RECORD, record)
    target.mkdir(parents=True, exist_ok=True)
    for name in (LOG, record.file, RECORD):
        if (target / name).is_dir():  # nothing of ours
            shutil.rmtree(target / name)
        (private / name).replace(target / name)
    for path in target.iterdir():
        if path.name not in (LOG, record.file, RECORD):
            with contextlib.suppress(OSError):  # a network's file system keeps what another process has mapped
                path.unlink()
    built = in_folder(target, recipe)
    assert built is not None, "what was just built is as its record says"
    return built


def keep_log(private: Path, target: Path) -> Path:
    """Move the log of a failed build to ``target``; returns where it is."""
    target.mkdir(parents=True, exist_ok=True)
    return (private / LOG).replace(target / FAILED_LOG)


def remove_leftovers(module_folder: Path) -> None:
    """Remove private folders of builds that died; only for the holder of the module's lock."""
    for place in module_folder.glob(f"{PRIVATE}*"):
        shutil.rmtree(place, ignore_errors=True)


def remove_builds(module_folder: Path) -> int:
    """Remove all builds of a module and what dead ones left; only for the holder of its lock. Returns bytes freed."""
    freed = 0
    for place in [*_builds(module_folder), *module_folder.glob(f"{PRIVATE}*")]:
        freed += sum(_size(path) for path in place.rglob("*"))
        shutil.rmtree(place)
    return freed


def module_folders() -> list[Path]:
    """Folders of modules in the cache."""
    with contextlib.suppress(OSError):
        return sorted(place for place in root().iterdir() if place.is_dir())
    return []


def _builds(module_folder: Path) -> Iterator[Path]:
    with contextlib.suppress(OSError):
        yield from (place for place in module_folder.iterdir() if _KEY.fullmatch(place.name))


def _read(record_file: Path, recipe: Recipe) -> Built | None:
    try:
        record = _record(json.loads(record_file.read_text(encoding="utf-8")))
        if record is None or (record.module, record.source_key) != (recipe.module.name, recipe.source_key):
            return None
        extension = record_file.with_name(record.file)
        fits = extension.stat().st_size == record.size and measure(extension) == (record.size, record.sha256)
    except (OSError, ValueError, RecursionError):
        return None
    return Built(extension, record) if fits else None


def _record(found: Any) -> Record | None:
    """The record in a JSON object; None where it is none of ours. Keys that a later version added are left out."""
    if not isinstance(found, dict):
        return None
    texts = [found.get(name) for name in ("module", "source_key", "file", "sha256")]
    if not all(isinstance(text, str) for text in (*texts, found.get("built", ""))) or "size" not in found:
        return None
    return Record(**{each.name: found[each.name] for each in fields(Record) if each.name in found})


def _size(path: Path) -> int:
    try:
        return path.stat().st_size if path.is_file() else 0
    except OSError:
        return 0
