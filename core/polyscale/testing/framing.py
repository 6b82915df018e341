"""Messages on a stream socket, of any size, with descriptors: each begins with its length."""

from __future__ import annotations

import socket
from collections.abc import Sequence

_LENGTH = 8


def send(to: socket.socket, message: bytes, descriptors: Sequence[int] = ()) -> None:
    """Send a message."""
    length = len(message).to_bytes(_LENGTH, "big")
    if descriptors:
        socket.send_fds(to, [length], list(descriptors))
    else:
        to.sendall(length)
    to.sendall(message)


def receive(source: socket.socket, *, descriptors: int = 0) -> tuple[bytes | None, list[int]]:
    """Wait for a message and at most so many descriptors; None: the other end has gone."""
    try:
        head, given, _, _ = socket.recv_fds(source, _LENGTH, descriptors)
        head += _exactly(source, _LENGTH - len(head)) if head else b""
        return (_exactly(source, int.from_bytes(head, "big")) if head else None), given
    except (ConnectionResetError, EOFError):
        return None, []


def _exactly(source: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = source.recv(min(size - len(data), 1 << 20))
        if not part:
            raise EOFError
        data += part
    return bytes(data)
