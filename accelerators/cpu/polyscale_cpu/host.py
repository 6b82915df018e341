"""What the report says of the host: processor, cores, memory, compiler. Nothing here raises."""

from __future__ import annotations

import os
import platform
import shutil
from pathlib import Path

from polyscale.interfaces.accelerator import Finding, Toolchain
from polyscale_cpu import env

_COMPILERS = ("c++", "g++", "clang++")
_FLAGS = ("-O3", "-std=c++17", "-fPIC")


def total_memory() -> int:
    """Bytes of memory that this process may use: the host's, or the container's limit (cgroup v2 or v1)."""
    limits = [_physical_memory()]
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        text = _read(path).strip()
        if text.isdigit():
            limits.append(int(text))
    return min((limit for limit in limits if limit > 0), default=0)


def usable_cores() -> int:
    """Cores that this process may run on."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else (os.cpu_count() or 1)


def toolchain() -> Toolchain | None:
    """The C++ compiler: ``CXX`` where it is set, else the first of the usual names.

    A ``CXX`` that is no program is passed on as it is, so that who compiles says so: to take another compiler in its
    place would hide the mistake.
    """
    named = env.compiler()
    if named is not None:
        return Toolchain(compiler=shutil.which(named) or named, flags=_FLAGS)
    path = next(filter(None, map(shutil.which, _COMPILERS)), None)
    return Toolchain(compiler=path, flags=_FLAGS) if path else None


def findings(compiler: Toolchain | None) -> list[Finding]:
    """Rows of the report."""
    import torch

    cores = f"{usable_cores()} of {os.cpu_count() or 1} usable, torch uses {torch.get_num_threads()} threads"
    rows = [
        Finding("processor", _processor()),
        Finding("cores", cores),
        Finding("vector instructions", torch.backends.cpu.get_cpu_capability()),
        Finding("memory", f"{total_memory() / 2**30:.1f} GiB"),
    ]
    if compiler is None:
        missing = Finding("C++ compiler", "none", ok=False, fix="Install g++ or clang++; until then references run")
        return [*rows, missing]
    if shutil.which(compiler.compiler) is None:
        fix = "CXX must name one program, without arguments; unset it for the usual compiler"
        return [*rows, Finding("C++ compiler", f"CXX={compiler.compiler!r} is no program", ok=False, fix=fix)]
    return [*rows, Finding("C++ compiler", compiler.compiler)]


def _physical_memory() -> int:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return 0


def _processor() -> str:
    for line in _read("/proc/cpuinfo").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
