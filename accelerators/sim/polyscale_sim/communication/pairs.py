"""Sends and receives between two ranks.

Notable: gloo ends the receiving process with a signal when more bytes come than were expected. So a short message with
size and dtype goes first, under a tag of its own, and the receiver asks for the bytes when it has seen it. Receives of
one source and tag are carried out in their order, on a thread; sends and collectives are in no order with them.
"""

from __future__ import annotations

from typing import Any

import torch

from polyscale_sim.communication.calls import flat
from polyscale_sim.communication.signature import DTYPES


class Sent:
    """Both messages of a send."""

    def __init__(self, *works: Any) -> None:
        self._works = works

    def wait(self, *timeout: Any) -> None:
        """Block until the other rank has them."""
        for work in self._works:
            work.wait(*timeout)


def send(gloo: Any, view: torch.Tensor, to: int, tag: int) -> Sent:
    """Start to send a host tensor to rank ``to`` of the group."""
    heading = torch.tensor([view.numel(), _number(view.dtype)])
    return Sent(gloo.send([heading], to, 2 * tag), gloo.send([flat(view)], to, 2 * tag + 1))


class Receipt:
    """One receive: asks for the heading at once, and for the bytes in ``take``.

    Attributes:
        source: rank in the group that sends; known after ``take`` where it may be any.
    """

    def __init__(self, gloo: Any, source: int | None, tag: int) -> None:
        self._gloo = gloo
        self._tag = tag
        self.source = source
        self._heading = torch.zeros(2, dtype=torch.int64)
        if source is None:
            self._work = gloo.recv_anysource([self._heading], 2 * tag)
        else:
            self._work = gloo.recv([self._heading], source, 2 * tag)

    def take(self, view: torch.Tensor) -> None:
        """Receive into a host tensor.

        Raises:
            RuntimeError: another size or dtype was sent; the message is used up.
        """
        self._work.wait()
        if self.source is None:
            self.source = int(self._work._source_rank())
        numel, number = self._heading.tolist()
        if numel == view.numel() and number == _number(view.dtype):
            self._gloo.recv([flat(view)], self.source, 2 * self._tag + 1).wait()
            return
        dtype = DTYPES[number] if number < len(DTYPES) else view.dtype
        self._gloo.recv([flat(torch.empty(numel, dtype=dtype))], self.source, 2 * self._tag + 1).wait()
        raise RuntimeError(
            f"recv of {view.numel()} elements of {view.dtype}: rank {self.source} of the group sends {numel} of {dtype}"
        )


def _number(dtype: torch.dtype) -> int:
    return DTYPES.index(dtype) if dtype in DTYPES else len(DTYPES)
