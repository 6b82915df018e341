"""Record that the tests of this tree passed here: what `scale-report` shows as `verified`.

Run by `make verify` after `make test`, and by `make gpu-check`. A plugin is recorded when it is usable on this machine,
because the tests of one that is not are skipped. The record goes into the member's package (`verified.json`), one per
hardware, or with --state into the user's state folder.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from importlib.util import find_spec
from pathlib import Path

import torch

from polyscale.discovery import installed
from polyscale.kinds import KINDS
from polyscale_cli.report.collect import collect
from polyscale_cli.report.verified import FILE, processor, record_verification

ROOT = Path(__file__).parent.parent


def usable() -> dict[str, list[str]]:
    """Package -> ``kind=name`` of its plugins that can be used here."""
    found: dict[str, list[str]] = {}
    rows = collect().plugins
    for kind in KINDS:
        available = {row.name for row in rows.get(kind, ()) if row.available}
        for entry in installed(kind):
            if entry.name in available:
                found.setdefault(entry.value.partition(":")[0].partition(".")[0], []).append(f"{kind}={entry.name}")
    return found


def commit() -> str:
    """Commit of the tested tree, or ""."""
    command = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def main() -> None:
    """Write the records, and say which."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--state", action="store_true", help="into the user's state folder, not into the tree")
    state = parser.parse_args().state
    device = torch.accelerator.current_accelerator()
    hardware = torch.get_device_module(device).get_device_name() if device is not None else processor()
    for package, passed in usable().items():
        spec = find_spec(package)
        folder = Path(next(iter(spec.submodule_search_locations or ()))) if spec is not None else ROOT
        path = None if state else folder / FILE
        if path is not None and path.exists():
            others = [entry for entry in json.loads(path.read_text("utf-8")) if entry.get("hardware") != hardware]
            path.write_text(json.dumps(others), "utf-8")
        file = record_verification(passed, torch=torch.__version__, hardware=hardware, commit=commit(), path=path)
        print(f"{file}: {', '.join(sorted(passed))} on {hardware}")


if __name__ == "__main__":
    main()
