"""Record that the tests of this tree passed here: what `scale-report` shows as `verified`.

Run by `make verify` after `make test`, and by `make gpu-check`. A plugin is recorded when it is usable on this machine,
because the tests of one that is not are skipped; an op library when what it compiles was built by the tests, for a
device that is here. The record goes into the member's package (`verified.json`), one per
hardware, or with --state into the user's state folder. An accelerator is recorded with its own device and driver; every
other plugin with those of the accelerator that is chosen here.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import torch

from polyscale.discovery import installed, load
from polyscale.kinds import KINDS
from polyscale.ops import status
from polyscale.ops.tools import available
from polyscale_cli.report.collect import collect
from polyscale_cli.report.model import Report
from polyscale_cli.report.verified import FILE, processor, record_verification

ROOT = Path(__file__).parent.parent
ACCELERATOR, OP = "accelerator", "op"


def usable(report: Report, *, gpu: bool = False) -> dict[tuple[str, str, str], list[str]]:
    """(package, hardware that it ran on, driver) -> ``kind=name`` of the plugins that can be used here.

    ``gpu``: only of those that tests marked gpu try.
    """
    found: dict[tuple[str, str, str], list[str]] = {}
    chosen = next((row.name for row in report.plugins[ACCELERATOR] if row.selected), "cpu")
    for kind in KINDS:
        usable_here = {row.name for row in report.plugins.get(kind, ()) if row.available}
        for entry in installed(kind):
            if gpu and not of_gpus(kind, entry.name):
                continue
            if entry.name in usable_here or (kind == OP and ran(entry.name)):
                package = entry.value.partition(":")[0].partition(".")[0]
                device = entry.name if kind == ACCELERATOR else chosen
                found.setdefault((package, *place(device)), []).append(f"{kind}={entry.name}")
    return found


def ran(library: str) -> bool:
    """Whether the kernels of an op library were built, for devices that are here (or it has references alone)."""
    modules = load(OP, library).modules()
    return all(status(each).path is not None and available(each.device_type) for each in modules)


def of_gpus(kind: str, name: str) -> bool:
    """Whether a plugin is for real devices other than the host's."""
    if kind == OP:
        modules = load(OP, name).modules()
        return any(each.device_type != "cpu" for each in modules)
    if kind != ACCELERATOR:
        return False
    made = load(ACCELERATOR, name)
    return bool(made.auto and made.device_type != "cpu")


def activate_simulated() -> None:
    """Let torch know devices that no one chooses by default, whose collectives can be used only then.

    Not where there is a real device beside the host's: torch may have one slot for both.
    """
    made = [load(ACCELERATOR, entry.name) for entry in installed(ACCELERATOR)]
    if any(each.auto and each.device_type != "cpu" and each.is_available() for each in made):
        return
    for accelerator in made:
        if not accelerator.auto and accelerator.is_available():
            accelerator.activate()


@cache
def place(accelerator: str) -> tuple[str, str]:
    """Hardware and driver of an accelerator; the processor where it is no hardware of its own."""
    made = load(ACCELERATOR, accelerator)
    if not made.auto or made.device_type == "cpu":
        return processor(), ""
    name = str(torch.get_device_module(made.device_type).get_device_name(0))
    return name, next((row.value for row in made.diagnose() if row.name == "driver"), "")


def commit() -> str:
    """Commit of the tested tree, or ""."""
    command = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the records, and say which."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--state", action="store_true", help="into the user's state folder, not into the tree")
    parser.add_argument("--gpu", action="store_true", help="only what the tests marked gpu try")
    options = parser.parse_args(arguments)
    activate_simulated()
    for (package, hardware, driver), passed in usable(collect(), gpu=options.gpu).items():
        spec = find_spec(package)
        folder = Path(next(iter(spec.submodule_search_locations or ()))) if spec is not None else ROOT
        path = None if options.state else folder / FILE
        if path is not None and path.exists():
            others = [entry for entry in json.loads(path.read_text("utf-8")) if entry.get("hardware") != hardware]
            path.write_text(json.dumps(others), "utf-8")
        version = torch.__version__
        file = record_verification(passed, torch=version, hardware=hardware, driver=driver, commit=commit(), path=path)
        print(f"{file}: {', '.join(sorted(passed))} on {hardware}")


if __name__ == "__main__":
    main()
