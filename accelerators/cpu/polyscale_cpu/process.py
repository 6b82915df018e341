"""The memory of this process, as the system counts it.

Notable: ``/proc`` first (current and peak, and the peak can be reset); elsewhere ``resource``, which not every system
has and which knows the peak only. Nothing here raises: where the system tells nothing, the numbers are 0.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

MIB = 1 << 20
# glibc (malloc.h, mallopt(3)): the largest threshold that it accepts for mapping is 32 MiB.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_MMAP_BYTES = 32 * MIB
_TRIM_BYTES = 512 * MIB


def memory() -> tuple[int, int]:
    """(resident, peak resident) bytes of this process."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return _from_resource()
    table = {name: rest.split() for name, _, rest in (line.partition(":") for line in lines)}
    resident, peak = (_kib(table.get(name)) for name in ("VmRSS", "VmHWM"))
    return resident, max(resident, peak)


def reset_peak() -> None:
    """Reset the peak to what is resident now (proc(5): writing 5 to clear_refs)."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def keep_freed_memory() -> None:
    """Raise glibc's thresholds: large blocks come from the heap, and a free leaves up to 512 MiB at its end."""
    with contextlib.suppress(OSError, AttributeError, ImportError, TypeError):
        import ctypes

        library = ctypes.CDLL(None)
        library.gnu_get_libc_version  # noqa: B018  other C libraries give these numbers other meanings
        library.mallopt(_MMAP_THRESHOLD, _MMAP_BYTES)
        library.mallopt(_TRIM_THRESHOLD, _TRIM_BYTES)


def release_freed_memory() -> None:
    """Call ``malloc_trim``, which glibc has."""
    with contextlib.suppress(OSError, AttributeError, ImportError, TypeError):
        import ctypes

        ctypes.CDLL(None).malloc_trim(0)


def _kib(words: list[str] | None) -> int:
    return int(words[0]) * 1024 if words else 0


def _from_resource() -> tuple[int, int]:
    try:
        import resource
    except ImportError:
        return 0, 0
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    peak = used if sys.platform == "darwin" else used * 1024
    return peak, peak
