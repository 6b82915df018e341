"""What ranks compare before the bytes of a collective move.

Notable: gloo ends the process with a signal when sizes differ between ranks. Here every rank sends a short row of
numbers first, and all ranks see all rows, so a difference is the same exception on every rank and the group goes on.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from polyscale import background

KINDS = (
    "all_reduce",
    "reduce",
    "broadcast",
    "all_gather",
    "reduce_scatter",
    "gather",
    "scatter",
    "all_to_all",
    "barrier",
)
DTYPES = (
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.uint16,
    torch.uint32,
    torch.uint64,
)
OPERATIONS = ("", "sum", "product", "min", "max", "band", "bor", "bxor", "avg", "premul_sum")
_FIELDS = 6


@dataclass(frozen=True)
class Signature:
    """What one rank calls.

    Attributes:
        kind: an element of ``KINDS``.
        sizes: elements of every tensor whose size all ranks must share.
        dtype: of the tensors; None without tensors.
        operation: an element of ``OPERATIONS``.
        root: rank in the group that sends to or receives from all, or -1.
        sends: elements for each rank (all_to_all).
        receives: elements from each rank (all_to_all).
    """

    kind: str
    sizes: tuple[int, ...] = ()
    dtype: torch.dtype | None = None
    operation: str = ""
    root: int = -1
    sends: tuple[int, ...] = ()
    receives: tuple[int, ...] = ()

    def row(self, world: int) -> torch.Tensor:
        """The numbers that are sent: int64, the same length on every rank whatever it calls."""
        dtype = -1 if self.dtype is None else DTYPES.index(self.dtype) if self.dtype in DTYPES else len(DTYPES)
        fields = [
            KINDS.index(self.kind),
            OPERATIONS.index(self.operation),
            dtype,
            self.root,
            sum(self.sizes),
            zlib.crc32(repr(self.sizes).encode()),
        ]
        none = (0,) * world
        return torch.tensor([*fields, *(self.sends or none), *(self.receives or none)], dtype=torch.int64)


def compare(gloo: Any, own: Signature) -> None:
    """Send this rank's row, receive those of all, and compare. Collective, on the thread of the queue.

    Raises:
        RuntimeError: on every rank of the group, with what two of them called.
    """
    world = gloo.size()
    if world == 1:
        return
    row = own.row(world)
    table = torch.empty(world * row.numel(), dtype=torch.int64)
    met = gloo._allgather_base(table, row)
    background.wait_until(met.is_completed)  # here a rank waits for those that have not called yet
    met.wait()
    rows = table.view(world, row.numel())
    for rank in range(1, world):
        if not torch.equal(rows[rank, :_FIELDS], rows[0, :_FIELDS]):
            raise RuntimeError(_message(rows[0], 0, rows[rank], rank))
    sends, receives = rows[:, _FIELDS : _FIELDS + world], rows[:, _FIELDS + world :]
    if not torch.equal(sends, receives.T):
        sender, receiver = (sends != receives.T).nonzero()[0].tolist()
        raise RuntimeError(
            f"all_to_all: rank {sender} sends {int(sends[sender, receiver])} elements to rank {receiver}, "
            f"which expects {int(receives[receiver, sender])}"
        )


def _message(first: torch.Tensor, one: int, second: torch.Tensor, two: int) -> str:
    texts = [_describe(row.tolist()) for row in (first, second)]
    if texts[0] == texts[1]:
        texts = [f"{text} in other pieces" for text in texts]
    return f"ranks of the group call different collectives: rank {one} {texts[0]}, rank {two} {texts[1]}"


def _describe(row: Sequence[int]) -> str:
    kind, operation, dtype, root, numel, _ = row[:_FIELDS]
    text = KINDS[kind]
    if OPERATIONS[operation]:
        text += f" ({OPERATIONS[operation]})"
    if dtype >= 0:
        name = str(DTYPES[dtype]).removeprefix("torch.") if dtype < len(DTYPES) else "another dtype"
        text += f" of {numel} elements of {name}"
    return text + (f" with root {root}" if root >= 0 else "")
