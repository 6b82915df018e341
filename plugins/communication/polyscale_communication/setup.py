"""How the ranks of a group find one another: through the store of the group, in steps that all of them make.

Notable: what one rank cannot do, none does. Each step writes what this rank has and how it fared, and reads what all
have; so all ranks come to the same verdict, the memory or the same reason to use gloo.

1. ``hello``: who it is, its segment, and why there is none.
2. ``met``: whether it could map the segments of all others, and read their ordinary memory.
3. ``socket`` and ``met again``: where /proc does not hand over descriptors, a socket does.
4. ``ready``: whether it got the rest of its memory.
"""

from __future__ import annotations

import json
import secrets
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from polyscale.control.processes import this_process
from polyscale.errors import PolyscaleError
from polyscale_communication.settings import MIB, Settings

LARGEST = 256


@dataclass
class Agreement:
    """What the ranks of a group have agreed on.

    Attributes:
        transport: of ``polyscale_shm``; None: there is none.
        why: then why not, in the same words on every rank.
    """

    transport: Any = None
    why: str = ""


def agree(store: Any, rank: int, size: int, timeout: timedelta, settings: Settings) -> Agreement:
    """Make the transport of a group. Collective.

    Raises:
        RuntimeError: other ranks do not come in time (torch's own error of the store).
    """
    nonce = secrets.randbits(63)
    transport, why = _first_memory(rank, size, nonce, settings)
    if size == 1:
        return _alone(transport, why, settings)
    generation = (int(store.add("shm/arrivals", 1)) - 1) // size  # the store may have served a group like this before
    meeting = _Meeting(store, f"shm/{generation}", rank, size, timeout)
    agreement = _together(meeting, transport, nonce, why, settings)
    if agreement.transport is None and transport is not None:
        transport.close()
    return agreement


@dataclass
class _Meeting:
    store: Any
    prefix: str
    rank: int
    size: int
    timeout: timedelta

    def exchange(self, step: str, row: dict[str, Any]) -> list[dict[str, Any]]:
        """Write this rank's row and read all."""
        keys = [f"{self.prefix}/{step}/{rank}" for rank in range(self.size)]
        self.store.set(keys[self.rank], json.dumps(row))
        self.store.wait(keys, self.timeout)
        return [json.loads(self.store.get(key)) for key in keys]


def _first_memory(rank: int, size: int, nonce: int, settings: Settings) -> tuple[Any, str]:
    """(transport with this rank's segment, "") or (None, why not)."""
    if not sys.platform.startswith("linux"):
        return None, f"it needs Linux, and this is {sys.platform}"
    if not settings.enabled:
        return None, "backends.options.shm.enabled is false"
    if size > LARGEST:
        return None, f"it serves at most {LARGEST} ranks, and these are {size}"
    try:
        from polyscale_shm import native

        return native().Transport(rank, size, nonce), ""
    except OSError as error:
        return None, f"shared memory is refused: {error}"
    except PolyscaleError as error:
        return None, str(error).split("\n", 1)[0]


def _alone(transport: Any, why: str, settings: Settings) -> Agreement:
    if transport is not None:
        transport.start(int(settings.staging_mib * MIB), settings.spin_s(1), False)
    return Agreement(transport, why)


def _together(meeting: _Meeting, transport: Any, nonce: int, why: str, settings: Settings) -> Agreement:
    me = this_process()
    row: dict[str, Any] = {"why": why, "host": me.host, "place": me.place, "staging": settings.staging_mib}
    row |= {"read": settings.read_memory, "how": settings.descriptors}
    if transport is not None:
        row |= {"pid": me.pid, "started": int(me.started or 0), "fd": transport.fd, "nonce": nonce}
        row |= {"address": transport.address}
    rows = meeting.exchange("hello", row)
    why = _first_reason(rows) or _several_hosts(rows)
    if why:
        return Agreement(why=why)
    ways = {each["how"] for each in rows} - {"auto"}
    if len(ways) > 1:
        return Agreement(why=f"backends.options.shm.descriptors is {' and '.join(sorted(ways))} on different ranks")
    met = [{"why": "descriptors go over a socket"}]
    if "socket" not in ways:
        met = meeting.exchange("met", _meet(transport, rows, meeting.rank, [""] * len(rows)))
    if _first_reason(met) and "proc" not in ways:
        sockets = [each["name"] for each in meeting.exchange("socket", _serving())]
        met = meeting.exchange("met again", _meet(transport, rows, meeting.rank, sockets))
    why = _first_reason(met)
    if why:
        return Agreement(why=why)
    read = all(each["read"] for each in (*rows, *met))
    staging = min(each["staging"] for each in rows)

    def start() -> None:
        transport.start(int(staging * MIB), settings.spin_s(len(rows)), read)

    ready = meeting.exchange("ready", {"why": _refusal(start)})
    why = _first_reason(ready)
    return Agreement(why=why) if why else Agreement(transport)


def _serving() -> dict[str, Any]:
    from polyscale_shm import native

    try:
        return {"name": native().serve()}
    except OSError:
        return {"name": "none"}


def _meet(transport: Any, rows: list[dict[str, Any]], rank: int, sockets: list[str]) -> dict[str, Any]:
    """Map the segments of all others; say how that went."""
    read = True
    for other, row in enumerate(rows):
        if other == rank:
            continue

        def connect(other: int = other, row: dict[str, Any] = row) -> None:
            transport.connect(other, row["pid"], row["started"], row["fd"], row["nonce"], sockets[other])

        why = _refusal(connect)
        if why:
            return {"why": why, "read": False}
        read = read and transport.can_read(other, row["address"], row["nonce"])
    return {"why": "", "read": read}


def _refusal(call: Callable[[], None]) -> str:
    try:
        call()
    except OSError as error:
        return f"shared memory is refused: {error}"
    return ""


def _first_reason(rows: list[dict[str, Any]]) -> str:
    for rank, row in enumerate(rows):
        if row["why"]:
            return f"rank {rank}: {row['why']}"
    return ""


def _several_hosts(rows: list[dict[str, Any]]) -> str:
    for rank, row in enumerate(rows):
        if row["place"] != rows[0]["place"]:
            if row["host"] == rows[0]["host"]:
                return f"ranks 0 and {rank} cannot see one another's processes on host {row['host']}"
            return f"its ranks are on several hosts: rank 0 on {rows[0]['host']}, rank {rank} on {row['host']}"
    return ""
