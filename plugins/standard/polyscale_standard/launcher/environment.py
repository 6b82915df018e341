"""What a rank finds in its environment, beside what the elastic agent sets.

Notable: one host needs no network. Everything goes over 127.0.0.1, and gloo is told the loopback interface, because it
would otherwise look up the host's name, which need not resolve. What the user has set is never overridden.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

LOOPBACK = "127.0.0.1"


def rank_defaults(nproc: int, environ: Mapping[str, str]) -> dict[str, str]:
    """Variables for every rank that ``environ`` leaves unset.

    Threads are shared out between the ranks (torchrun gives each one thread); output is unbuffered, because Python
    buffers a pipe by kilobytes and a line would not show until much later.
    """
    defaults = {"OMP_NUM_THREADS": str(max(1, cores() // nproc)), "PYTHONUNBUFFERED": "1"}
    if (loopback := loopback_interface()) is not None:
        defaults["GLOO_SOCKET_IFNAME"] = loopback
    return {name: value for name, value in defaults.items() if name not in environ}


def contract(rank: int, nproc: int, port: int) -> dict[str, str]:
    """The variables of torchrun's contract, for a rank started by hand (``--dry-run``)."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(nproc),
        "LOCAL_WORLD_SIZE": str(nproc),
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(port),
    }


def cores() -> int:
    """Processors that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def loopback_interface() -> str | None:
    """Name of the loopback interface ("lo", "lo0"); None where interfaces cannot be listed."""
    try:
        names = [name for _, name in socket.if_nameindex()]
    except (AttributeError, OSError):
        return None
    return next((name for name in names if name.rstrip("0123456789") == "lo"), None)


def free_port() -> int:
    """A TCP port that is free on the loopback interface now."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        port: int = probe.getsockname()[1]
        return port
