"""Where each tensor lies in which safetensors file, computed before there is any tensor.

Notable: pure arithmetic. The format (https://github.com/huggingface/safetensors, README): 8 bytes little-endian length
of the header, a JSON header padded with spaces, then the data without holes. Tensors lie in order of falling element
size, so each begins at a multiple of its own; the header ends at a multiple of 8.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from polyscale.errors import CheckpointError

if TYPE_CHECKING:
    import torch

Plan = Sequence[tuple[str, Sequence[int], "torch.dtype"]]

_NAMES = {
    "float64": ("F64", 8),
    "int64": ("I64", 8),
    "uint64": ("U64", 8),
    "complex64": ("C64", 8),
    "float32": ("F32", 4),
    "int32": ("I32", 4),
    "uint32": ("U32", 4),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "int16": ("I16", 2),
    "uint16": ("U16", 2),
    "int8": ("I8", 1),
    "uint8": ("U8", 1),
    "bool": ("BOOL", 1),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "float8_e5m2": ("F8_E5M2", 1),
    "float8_e8m0fnu": ("F8_E8M0", 1),
}


@dataclass(frozen=True)
class Slot:
    """Where one tensor lies.

    Attributes:
        name: its key.
        shape: its shape.
        dtype: its name without "torch." ("float32").
        begin: its first byte, counted from the end of the header.
        end: one past its last byte.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    begin: int = 0
    end: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of its data."""
        return math.prod(self.shape) * _NAMES[self.dtype][1]


@dataclass(frozen=True)
class Shard:
    """One file: its header, and the slots of its tensors by name."""

    header: bytes
    slots: Mapping[str, Slot]

    @property
    def nbytes(self) -> int:
        """Size of the file."""
        return len(self.header) + sum(slot.nbytes for slot in self.slots.values())


def lay_out(plan: Plan, metadata: Mapping[str, str], max_shard_bytes: int) -> list[Shard]:
    """Cut ``plan`` into files of at most ``max_shard_bytes`` of data each; a larger tensor has one of its own.

    Raises:
        CheckpointError: a name twice or reserved, a dtype that the format lacks, metadata that is not text.
    """
    if max_shard_bytes <= 0:
        raise CheckpointError(f"max_shard_bytes={max_shard_bytes}", why="it must be positive")
    for key, value in metadata.items():
        if not (isinstance(key, str) and isinstance(value, str)):
            raise CheckpointError(f"metadata[{key!r}] = {value!r}", why="safetensors metadata is text to text")
    groups: list[list[Slot]] = [[]]
    held = 0
    for slot in _slots(plan):
        if groups[-1] and held + slot.nbytes > max_shard_bytes:
            groups.append([])
            held = 0
        groups[-1].append(slot)
        held += slot.nbytes
    return [_shard(group, metadata) for group in groups]


def _slots(plan: Plan) -> list[Slot]:
    slots: dict[str, Slot] = {}
    for name, shape, dtype in plan:
        slot = Slot(name, tuple(shape), str(dtype).removeprefix("torch."))
        if not isinstance(name, str) or name == "__metadata__":
            raise CheckpointError(f"Tensor name {name!r}", why="safetensors cannot hold it")
        if name in slots:
            raise CheckpointError(f"Tensor '{name}'", why="it is in the plan twice")
        if slot.dtype not in _NAMES:
            raise CheckpointError(
                f"Tensor '{name}' is {slot.dtype}", why="safetensors lacks it", fix=f"It has {', '.join(_NAMES)}"
            )
        slots[name] = slot
    return list(slots.values())


def _shard(slots: Sequence[Slot], metadata: Mapping[str, str]) -> Shard:
    placed: dict[str, Slot] = {}
    begin = 0
    for slot in sorted(slots, key=lambda slot: -_NAMES[slot.dtype][1]):
        placed[slot.name] = Slot(slot.name, slot.shape, slot.dtype, begin, begin + slot.nbytes)
        begin += slot.nbytes
    table: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    for slot in placed.values():
        table[slot.name] = {
            "dtype": _NAMES[slot.dtype][0],
            "shape": list(slot.shape),
            "data_offsets": [slot.begin, slot.end],
        }
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return Shard(len(text).to_bytes(8, "little") + text, placed)
