"""Weights as safetensors, one tensor in memory at a time.

Notable: the header is computed from a plan before the first tensor comes, so each tensor is written to its place as it
comes, in any order, through an io plugin. Files get their names only when all are complete and on the device. A failure
does not stop the iterator: it is run to its end first, because gathering the next tensor is a collective that other
ranks take part in.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterator, Mapping
from contextlib import suppress
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

from polyscale.checkpoint.durable import fsync_directory, fsync_file, make_directory, write_bytes
from polyscale.checkpoint.faults import failure
from polyscale.checkpoint.safetensors_layout import Plan, Shard, Slot, lay_out
from polyscale.errors import CheckpointError

if TYPE_CHECKING:
    import torch

    from polyscale.interfaces.io import FileIO

GIB = 1 << 30
_SUFFIX = ".safetensors"


def export_safetensors(
    tensors: Iterator[tuple[str, torch.Tensor]],
    plan: Plan,
    path: str | PathLike[str],
    io: FileIO,
    *,
    metadata: Mapping[str, str] | None = None,
    max_shard_bytes: int = 5 * GIB,
) -> list[Path]:
    """Write ``tensors`` as ``path/model.safetensors``, or as numbered files with an index where they are larger.

    One rank writes; the others run the same iterator to its end. Earlier files of the same name are replaced.

    Args:
        tensors: (name, value), each name of the plan once, in any order; run to its end in any case.
        plan: (name, shape, dtype) of every tensor to come; tied names each have an entry and are each written.
        path: a directory, made if absent; or a file name ending in ".safetensors", whose stem then names the files.
        io: moves the bytes.
        metadata: text for the header; default ``{"format": "pt"}``, which transformers asks for.
        max_shard_bytes: largest size of the data of one file.

    Returns:
        The files written; the index last, where there is one.

    Raises:
        CheckpointError: plan and iterator do not match, or the system refuses; no file is left, and earlier ones stand.
    """
    target = Path(path)
    folder, stem = (target.parent, target.stem) if target.suffix == _SUFFIX else (target, "model")
    export: _Export | None = None
    error: Exception | None = None
    try:
        shards = lay_out(plan, {"format": "pt"} if metadata is None else metadata, max_shard_bytes)
        export = _Export(folder, stem, shards, io)
        export.start()
    except Exception as caught:
        error = caught
    try:
        for name, tensor in tensors:
            if error is None and export is not None:
                try:
                    export.take(name, tensor)
                except Exception as caught:
                    error = caught
            del tensor  # before the next one is gathered
        if error is None and export is not None:
            try:
                return export.finish()
            except Exception as caught:
                error = caught
    finally:
        if export is not None:
            export.clean()
    assert error is not None
    raise failure(folder, "written", error) from error


class _Export:
    """Files under way: temporary names until ``finish``."""

    def __init__(self, folder: Path, stem: str, shards: list[Shard], io: FileIO) -> None:
        self._folder = folder
        self._io = io
        self._shards = shards
        count = len(shards)
        numbered = [f"{stem}-{number:05d}-of-{count:05d}{_SUFFIX}" for number in range(1, count + 1)]
        self._names = numbered if count > 1 else [f"{stem}{_SUFFIX}"]
        self._index = f"{stem}{_SUFFIX}.index.json"
        self._single = f"{stem}{_SUFFIX}"
        self._numbered = re.compile(re.escape(stem) + r"-\d{5}-of-\d{5}" + re.escape(_SUFFIX))
        token = secrets.token_hex(4)
        self._aside = {name: folder / f".{name}.tmp-{token}" for name in (*self._names, self._index)}
        self._waiting = {name: place for place, shard in enumerate(shards) for name in shard.slots}
        self._total = sum(slot.nbytes for shard in shards for slot in shard.slots.values())

    def start(self) -> None:
        """Make the files, with their headers."""
        import torch

        make_directory(self._folder)
        for shard, name in zip(self._shards, self._names, strict=True):
            write_bytes(self._aside[name], b"")
            self._io.write(torch.frombuffer(bytearray(shard.header), dtype=torch.uint8), self._aside[name], 0)

    def take(self, name: str, tensor: torch.Tensor) -> None:
        """Write one tensor to its place."""
        place = self._waiting.pop(name, None)
        if place is None:
            known = any(name in shard.slots for shard in self._shards)
            why = "it came twice" if known else "the plan does not have it"
            raise CheckpointError(f"Tensor '{name}' cannot be exported", why=why)
        shard = self._shards[place]
        slot = shard.slots[name]
        _check(slot, tensor)
        if slot.nbytes:
            data = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
            self._io.write(data, self._aside[self._names[place]], len(shard.header) + slot.begin)

    def finish(self) -> list[Path]:
        """Give the files their names. A crash on the way leaves no index, so a mix of files is never loaded."""
        if self._waiting:
            missing = ", ".join(list(self._waiting)[:10])
            raise CheckpointError(f"{len(self._waiting)} tensors of the plan did not come", why=missing)
        for shard, name in zip(self._shards, self._names, strict=True):
            size = self._aside[name].stat().st_size
            if size != shard.nbytes:
                raise CheckpointError(f"{name} has {size} bytes", why=f"{shard.nbytes} were written")
            fsync_file(self._aside[name])
        sharded = len(self._names) > 1
        if sharded:
            write_bytes(self._aside[self._index], self._index_text())
            (self._folder / self._index).unlink(missing_ok=True)
        made = [*self._names, self._index] if sharded else self._names
        for name in made:
            self._aside[name].replace(self._folder / name)
        fsync_directory(self._folder)
        self._remove_earlier(set(made))
        return [self._folder / name for name in made]

    def clean(self) -> None:
        """Remove what has no name yet."""
        for path in self._aside.values():
            with suppress(OSError):  # what made the export fail says more
                path.unlink()

    def _index_text(self) -> bytes:
        weight_map = {name: file for shard, file in zip(self._shards, self._names, strict=True) for name in shard.slots}
        content = {"metadata": {"total_size": self._total}, "weight_map": dict(sorted(weight_map.items()))}
        return (json.dumps(content, indent=2) + "\n").encode()

    def _remove_earlier(self, made: set[str]) -> None:
        """Readers prefer a single file to an index: what an earlier export left must not be found."""
        for path in self._folder.iterdir():
            ours = path.name in (self._single, self._index) or self._numbered.fullmatch(path.name)
            if ours and path.name not in made:
                path.unlink(missing_ok=True)


def _check(slot: Slot, tensor: torch.Tensor) -> None:
    dtype = str(tensor.dtype).removeprefix("torch.")
    if tuple(tensor.shape) != slot.shape or dtype != slot.dtype:
        raise CheckpointError(
            f"Tensor '{slot.name}' is {list(tensor.shape)} {dtype}",
            why=f"the plan says {list(slot.shape)} {slot.dtype}",
        )
