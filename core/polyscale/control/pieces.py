"""Texts (ASCII, as JSON is) of any length in a store whose values have a limit.

Notable: torch's TCPStore drops the connection of a rank that sends a value of more than 8 MiB. A longer text is written
in pieces under keys of their own, and the number of pieces, written last, stands in its place.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

PIECE = 4 << 20
"""Bytes of a piece."""

_WHOLE, _PIECES = "=", "#"


def write(store: Store, key: str, text: str) -> None:
    """Set ``key`` to ``text``; whoever sees the key can read all of it."""
    if len(text) <= PIECE:
        store.set(key, _WHOLE + text)
        return
    starts = range(0, len(text), PIECE)
    for number, start in enumerate(starts):
        store.set(_piece(key, number), text[start : start + PIECE])
    store.set(key, f"{_PIECES}{len(starts)}")


def read(store: Store, keys: list[str]) -> list[str]:
    """The texts of ``keys``, which have been written."""
    return [_joined(store, key, value.decode()) for key, value in zip(keys, store.multi_get(keys), strict=True)]


def delete(store: Store, keys: Iterable[str]) -> None:
    """Remove ``keys``, which have been written, with their pieces."""
    for key in keys:
        for number in range(_count(store.get(key).decode())):
            store.delete_key(_piece(key, number))
        store.delete_key(key)


def _joined(store: Store, key: str, value: str) -> str:
    if value.startswith(_WHOLE):
        return value[1:]
    return "".join(store.get(_piece(key, number)).decode() for number in range(_count(value)))


def _count(value: str) -> int:
    return int(value[1:]) if value.startswith(_PIECES) else 0


def _piece(key: str, number: int) -> str:
    return f"{key}/piece/{number}"
