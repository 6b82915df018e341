"""On which hardware a plugin last passed its tests.

Notable: a record is a fact somebody measured, so it travels with the code it is about: ``verified.json`` in the
member's package, a list of objects ``{hardware, driver, torch, commit, passed, date}`` where ``passed`` lists
``kind=name`` of what was tested and ``date`` is ISO 8601. The user's own tests add records in their state folder, in
the same format. Of all records about a plugin the newest counts, and of those of one day the user's own. Nothing is
imported to read them.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import platform
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from polyscale_cli import env

FILE = "verified.json"
NEVER = "never"


@dataclass(frozen=True)
class Verification:
    """One record.

    Attributes:
        hardware: what the tests ran on ("AMD EPYC 7763").
        driver: version of its driver, or "".
        torch: version of torch.
        commit: commit of the tested code, or "".
        passed: ``kind=name`` of every plugin whose tests passed.
        date: day, ISO 8601.
    """

    hardware: str
    driver: str
    torch: str
    commit: str
    passed: tuple[str, ...]
    date: str


def verified(kind: str, name: str, value: str) -> str:
    """Hardware on which plugin ``name`` of ``kind`` last passed its tests, or "never".

    Args:
        kind: kind of plugin.
        name: its name.
        value: its entry point, ``module:class``; says in which package its records are.
    """
    records = [*_packaged(value.partition(":")[0].partition(".")[0]), *_local(env.state_folder() / FILE)]
    about = [record for record in records if f"{kind}={name}" in record.passed]
    return max(reversed(about), key=lambda record: record.date).hardware if about else NEVER


def record_verification(
    passed: Iterable[str],
    *,
    torch: str,
    hardware: str = "",
    driver: str = "",
    commit: str = "",
    path: Path | None = None,
) -> Path:
    """Add a record that the tests of ``passed`` (``kind=name``) passed today; returns the file.

    Args:
        passed: what was tested.
        torch: version of torch.
        hardware: what it was tested on; "": this host's processor.
        driver: version of the driver.
        commit: commit of the tested code.
        path: file to add to; None: the user's state folder.
    """
    path = env.state_folder() / FILE if path is None else path
    today = datetime.date.today().isoformat()
    new = Verification(hardware or processor(), driver, torch, commit, tuple(sorted(set(passed))), today)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.write_text(json.dumps([*map(asdict, _local(path)), asdict(new)], indent=1) + "\n", encoding="utf-8")
    temporary.replace(path)
    return path


def processor() -> str:
    """Name of this host's processor."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            label, _, value = line.partition(":")
            if label.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine() or "unknown processor"


@lru_cache(maxsize=64)
def _packaged(package: str) -> tuple[Verification, ...]:
    """Records in the data of an installed package."""
    try:
        spec = find_spec(package)
    except (ImportError, ValueError):
        return ()
    folders = (spec.submodule_search_locations if spec is not None else None) or ()
    return tuple(record for folder in folders for record in _local(Path(folder) / FILE))


def _local(path: Path) -> list[Verification]:
    """Records in a file; those that cannot be read are left out."""
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    return list(_parse(entries if isinstance(entries, list) else []))


def _parse(entries: Iterable[Any]) -> Iterator[Verification]:
    for entry in entries:
        if isinstance(entry, Mapping) and entry.get("hardware") and isinstance(entry.get("passed"), list):
            texts = {key: str(entry.get(key, "")) for key in ("hardware", "driver", "torch", "commit", "date")}
            yield Verification(passed=tuple(map(str, entry["passed"])), **texts)
