"""``scale run``: a script on several ranks of this host."""

from __future__ import annotations

import shutil
import sys
import warnings
from collections.abc import Sequence
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path

from polyscale.discovery import load, select_accelerator
from polyscale.errors import PolyscaleError
from polyscale.interfaces.launcher import LaunchRequest
from polyscale_cli.commands.logs import logs_to_stderr

_LAUNCHER = "local"
_PYTHON = (".py", ".pyw", ".pyc", ".pyz", ".zip")


def run_ranks(
    target: str,
    arguments: Sequence[str],
    *,
    module: bool = False,
    nproc: int | None = None,
    log_dir: str | None = None,
    dry_run: bool = False,
) -> int:
    """Start ranks, or print what would be started; returns the exit code.

    Args:
        target: script, or name of a module.
        arguments: given to it untouched.
        module: whether ``target`` is a module.
        nproc: number of ranks; None: one per device of the accelerator that would be chosen.
        log_dir: folder for one file per rank and stream.
        dry_run: print the command lines instead.
    """
    launcher = load("launcher", _LAUNCHER)
    if not launcher.is_available():
        raise PolyscaleError(f"Launcher {_LAUNCHER!r}", why=launcher.why_unavailable())
    if module:
        check_module(target)
    else:
        check_script(Path(target))
    command = [sys.executable, "-m", target, *arguments] if module else [target, *arguments]
    request = LaunchRequest(command, nproc=nproc if nproc is not None else 1, log_dir=log_dir)
    plan = launcher.plan(request)  # refuses a missing script before torch is imported to count devices
    if nproc is None and (devices := default_nproc()) != 1:
        request = LaunchRequest(command, nproc=devices, log_dir=log_dir)
        plan = launcher.plan(request)
    if dry_run:
        sys.stdout.writelines(f"{line}\n" for line in plan)
        return 0
    with logs_to_stderr():
        code: int = launcher.run(request)
    return code


def check_module(name: str) -> None:
    """Refuse a module whose package is neither in the current folder, where ``python -m`` looks first, nor installed.

    Raises:
        PolyscaleError: it is not there.
    """
    top = name.partition(".")[0]
    try:
        found = PathFinder.find_spec(top, [str(Path.cwd())]) or find_spec(top)
    except (ImportError, ValueError):
        found = None
    if found is None:
        why = f"{top} is neither in {Path.cwd()} nor installed"
        raise PolyscaleError(f"Module {name}", why=why, fix="Check the name, or give the path of a script without -m")


def check_script(path: Path) -> None:
    """Refuse a file that would be run as Python and plainly is none.

    Taken are files that Python names (``.py``), that may be executed, or whose first line names Python; without an
    ending in letters (``train``), also what compiles. What is not there is the launcher's to refuse.

    Raises:
        PolyscaleError: it is no Python.
    """
    if path.suffix in _PYTHON or not path.is_file() or shutil.which(str(path)) is not None:
        return
    try:
        source = path.read_bytes()
    except OSError:
        return
    first = source.partition(b"\n")[0]
    if first.startswith(b"#!") and b"python" in first:
        return
    if why := _why_no_python(path, source):
        fix = "Give a Python script (its name ends in .py, or its first line is #!/usr/bin/env python3) or a program"
        raise PolyscaleError(f"Script {path}", why=why, fix=fix)


def _why_no_python(path: Path, source: bytes) -> str:
    if source.startswith(b"#!"):
        return "its first line names another interpreter, and it may not be executed (chmod +x)"
    if path.suffix[1:].isalpha():
        return f"a file that ends in {path.suffix} is no Python script"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile(source, str(path), "exec", dont_inherit=True)
    except SyntaxError as error:
        return f"it is no Python: line {error.lineno}, {error.msg}"
    except ValueError as error:  # null bytes
        return f"it is no Python: {error}"
    return ""


def default_nproc() -> int:
    """Number of devices of the accelerator that would be chosen; 1 on cpu."""
    return max(1, select_accelerator().device_count())
