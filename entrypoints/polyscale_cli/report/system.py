"""Facts about the machine: compilers, ninja, shared memory, NUMA nodes, network interfaces.

Notable: each fact is found by itself and a fact that cannot be found says so; none needs a module that Windows lacks.
"""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from polyscale_cli import env
from polyscale_cli.report.model import Fact

_SHM = Path("/dev/shm")
_SHM_LOW = 512 * 2**20
_VERSION_TIMEOUT_S = 10


def system_facts() -> list[Fact]:
    """Every fact of this file; the programs asked for their version run side by side."""
    c, cpp = env.compiler_names()
    finders: list[tuple[str, Callable[[], Fact]]] = [
        ("C compiler", lambda: compiler("C compiler", c)),
        ("C++ compiler", lambda: compiler("C++ compiler", cpp)),
        ("ninja", ninja),
        ("shared memory", shared_memory),
        ("NUMA nodes", numa_nodes),
        ("network interfaces", network_interfaces),
    ]
    with ThreadPoolExecutor(max_workers=3) as pool:
        return list(pool.map(lambda finder: _guarded(*finder), finders))


def compiler(name: str, candidates: Iterable[str]) -> Fact:
    """The first of ``candidates`` that exists, and its version."""
    for candidate in candidates:
        path = shutil.which(candidate)
        if path is not None:
            return Fact(name, f"{path} ({_first_line([path, '--version'])})")
    return Fact(name, "none", ok=False, fix="Optional: kernels fall back to PyTorch code. Install gcc or clang")


def ninja() -> Fact:
    """The ninja that builds kernels."""
    path = shutil.which("ninja")
    if path is None:
        return Fact("ninja", "none", ok=False, fix="Optional, builds kernels: pip install ninja")
    return Fact("ninja", f"{path} ({_first_line([path, '--version'])})")


def shared_memory() -> Fact:
    """Size of ``/dev/shm``, which data loaders and ranks of one host share."""
    if not _SHM.is_dir():
        return Fact("shared memory", "no /dev/shm on this system")
    usage = shutil.disk_usage(_SHM)
    value = f"{usage.free / 2**30:.1f} GiB free of {usage.total / 2**30:.1f} GiB in {_SHM}"
    if usage.total < _SHM_LOW:
        return Fact("shared memory", value, ok=False, fix="Data loaders need more; in a container: --shm-size=1g")
    return Fact("shared memory", value)


def numa_nodes() -> Fact:
    """Number of NUMA nodes that are online."""
    try:
        text = Path("/sys/devices/system/node/online").read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return Fact("NUMA nodes", "unknown on this system")
    return Fact("NUMA nodes", f"{count_ranges(text)} ({text})")


def count_ranges(text: str) -> int:
    """Count the numbers in a list of ranges of the kernel ("0-3,8": 5)."""
    total = 0
    for part in filter(None, text.split(",")):
        low, _, high = part.partition("-")
        total += int(high or low) - int(low) + 1
    return total


def network_interfaces() -> Fact:
    """Names of the network interfaces."""
    names = [name for _, name in socket.if_nameindex()]
    return Fact("network interfaces", ", ".join(names) or "none")


def _guarded(name: str, find: Callable[[], Fact]) -> Fact:
    try:
        return find()
    except Exception as error:  # a fact that cannot be found is not a reason to fail
        return Fact(name, f"unknown ({type(error).__name__}: {error})")


def _first_line(command: list[str]) -> str:
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(command, capture_output=True, timeout=_VERSION_TIMEOUT_S, check=False)
        lines = (done.stdout or done.stderr).decode(errors="replace").strip().splitlines()
        if lines:
            return lines[0]
    return "version unknown"
