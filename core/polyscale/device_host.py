"""What members ask a host about a device: its driver, its device files, its compiler. Nothing here raises.

Notable: a mask of visible devices has the same traps for most vendors (an empty one, one that starts with a device that
is absent), so they are explained in one place; the vendor's member says what its variable is called and who lists the
devices.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path

from polyscale.interfaces.accelerator import Finding, Toolchain

_HIDES_ALL = ("", "-1")


def tool_output(command: Sequence[str], *, timeout_s: float = 10.0) -> str:
    """What a vendor's tool prints; "" where it is absent, fails, or does not end."""
    try:
        done = subprocess.run(command, capture_output=True, timeout=timeout_s, check=False)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.decode(errors="replace") if done.returncode == 0 else ""


def version_in(text: str) -> str:
    """The first version number (two parts or more) in ``text``; "" where there is none."""
    found = re.search(r"\d+(?:\.\w+)+", text)
    return found.group() if found else ""


def first_line(*paths: str) -> str:
    """The first line of the first of these files that can be read; patterns are allowed. "" where there is none."""
    for pattern in paths:
        for path in files(pattern):
            with contextlib.suppress(OSError):
                if lines := Path(path).read_text("utf-8", "replace").splitlines():
                    return lines[0].strip()
    return ""


def files(pattern: str) -> list[str]:
    """Files that match an absolute pattern ("/dev/acme[0-9]*"), in order."""
    return sorted(map(str, Path("/").glob(pattern.lstrip("/"))))


def can_open(path: str) -> bool:
    """Whether this user may read and write a device file."""
    return os.access(path, os.R_OK | os.W_OK)


def can_load(*libraries: str) -> bool:
    """Whether one of these shared libraries can be loaded."""
    for name in libraries:
        with contextlib.suppress(OSError):
            ctypes.CDLL(name)
            return True
    return False


def find_compiler(
    name: str, folders: Iterable[str | None], flags: tuple[str, ...], *, root: str = ".."
) -> Toolchain | None:
    """A compiler in one of ``folders`` or on the path; None where there is none.

    Args:
        name: its file name.
        folders: where it may be, best first; None is left out.
        flags: what it is given.
        root: where the toolkit's root is, seen from the compiler's folder.
    """
    for candidate in (*(str(Path(folder) / name) for folder in folders if folder), shutil.which(name)):
        if candidate is not None and Path(candidate).is_file():
            return Toolchain(candidate, flags, str((Path(candidate).resolve().parent / root).resolve()))
    return None


def compiler_row(name: str, compiler: Toolchain | None, fix: str) -> Finding:
    """The report's row for a compiler."""
    if compiler is None:
        return Finding(name, "none", ok=False, fix=f"Only needed to compile kernels: {fix}")
    version = version_in(tool_output([compiler.compiler, "--version"])) or "unknown version"
    return Finding(name, f"{version} ({compiler.compiler})")


def explain_mask(variable: str, mask: str | None, devices: int | None) -> str:
    """Say why a mask leaves no device; "" where it is not the cause, or may not be.

    Args:
        variable: name of the environment variable.
        mask: its value; None: not set. A list of indices, read up to the first that names no device. Devices named
            otherwise, as by an identifier, are not judged: they may be there.
        devices: how many the host has; None: not known.
    """
    if mask is None or devices == 0:
        return ""
    if mask.strip() in _HIDES_ALL:
        return f"{variable}={mask!r} hides every device; unset it"
    first = mask.split(",")[0].strip()
    if not re.fullmatch("-?[0-9]+", first):
        return ""
    if devices is not None and 0 <= int(first) < devices:
        return ""
    valid = "" if devices is None else f"; this host has {devices}: 0" + (f" to {devices - 1}" if devices > 1 else "")
    return f"{variable}={mask!r} starts with a device that is absent, which hides every device{valid}"
