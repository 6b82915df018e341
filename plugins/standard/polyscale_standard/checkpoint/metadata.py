"""Reading ``.metadata``, which is a pickle, without letting it execute anything.

Notable: the unpickler knows by exact module and name the classes that DCP writes there (measured on what torch saves:
tensors of all kinds, nested dicts, non-tensors) and torch's dtypes; any other name in the file ends the reading. In
place of those classes it makes records, of types that live as long as the reading: a pickle can set attributes of a
class that it may name, and must not set those of DCP. The metadata is then built from the records, with every type,
offset and file name checked.
"""

from __future__ import annotations

import io
import pickle
from os import PathLike
from pathlib import Path, PurePath
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from polyscale._torch import dcp_metadata_names, dcp_storage_info
from polyscale.checkpoint.faults import failure
from polyscale.errors import CheckpointError

METADATA = ".metadata"
T = TypeVar("T")


def read_metadata(directory: str | PathLike[str]) -> Metadata:
    """Read and check the metadata of the checkpoint in ``directory``.

    Raises:
        CheckpointError: it is missing, damaged, names what DCP does not write there, or describes what cannot be.
    """
    path = Path(directory, METADATA)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise failure(path, "read", error) from error
    try:
        return _metadata(_Unpickler(io.BytesIO(data)).load())
    except CheckpointError:
        raise
    except Exception as error:  # a damaged pickle raises nearly anything
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(
            f"{path} cannot be read", why=f"it is damaged ({reason})", fix="Load another checkpoint"
        ) from error


def check_files(directory: str | PathLike[str], metadata: Metadata, used: set[MetadataIndex]) -> None:
    """Check that the data files hold what the ``used`` storage indices point to.

    Raises:
        CheckpointError: a file is missing or too short.
    """
    ends: dict[str, int] = {}
    for index in used:
        info = metadata.storage_data[index]
        ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
    for name, end in ends.items():
        path = Path(directory, name)
        try:
            size = path.stat().st_size
        except OSError as error:
            raise failure(path, "read", error) from error
        if size < end:
            raise CheckpointError(
                f"{path} is cut short",
                why=f"it has {size} bytes, and at least {end} are needed",
                fix="Load another checkpoint",
            )


class _Record:
    """What stands for an object of the file: what it was called with, or its state."""

    args: tuple[Any, ...] = ()
    state: Any = None

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def get(self, name: str, kind: type[T]) -> T:
        """The attribute ``name``, which must be a ``kind``."""
        return _typed(self.state[name], kind, name)


class _Unpickler(pickle.Unpickler):
    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream)
        self._admitted = {place: type(place[1], (_Record,), {}) for place in dcp_metadata_names()}

    def find_class(self, module: str, name: str) -> Any:
        record = self._admitted.get((module, name))
        if record is not None:
            return record
        if (module, name) == ("torch", "Size"):
            return torch.Size
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise CheckpointError(
            f"{METADATA} names '{module}.{name}'",
            why="DCP writes no such thing there, and reading it could execute code of the file",
            fix="Do not load this checkpoint",
        )

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("it uses persistent ids")


def _metadata(record: Any) -> Metadata:
    _of(record, "Metadata")
    entries = {_typed(name, str, "name"): _entry(name, entry) for name, entry in _pairs(record, "state_dict_metadata")}
    return Metadata(entries, storage_data={_index(key): _info(info) for key, info in _pairs(record, "storage_data")})


def _pairs(record: _Record, name: str) -> list[tuple[Any, Any]]:
    return list(record.get(name, dict).items())


def _entry(name: str, record: _Record) -> TensorStorageMetadata | BytesStorageMetadata:
    if type(record).__name__ == "BytesStorageMetadata":
        return BytesStorageMetadata()
    _of(record, "TensorStorageMetadata")
    properties = record.get("properties", _Record).state
    size = record.get("size", torch.Size)
    dtype = _typed(properties[0], torch.dtype, "dtype")
    chunks = [_chunk(name, size, chunk) for chunk in record.get("chunks", list)]
    return TensorStorageMetadata(TensorProperties(dtype=dtype), size, chunks)


def _chunk(name: str, whole: torch.Size, record: _Record) -> ChunkStorageMetadata:
    offsets, sizes = record.get("offsets", torch.Size), record.get("sizes", torch.Size)
    places = zip(offsets, sizes, whole, strict=True)
    if not all(first >= 0 and size >= 0 and first + size <= end for first, size, end in places):
        raise ValueError(f"a block of '{name}' lies outside of it")
    return ChunkStorageMetadata(offsets, sizes)


def _index(record: _Record) -> MetadataIndex:
    offset = record.state.get("offset")
    return MetadataIndex(record.get("fqn", str), None if offset is None else _typed(offset, torch.Size, "offset"))


def _info(record: _Record) -> Any:
    path, offset, length = record.get("relative_path", str), record.get("offset", int), record.get("length", int)
    if PurePath(path).name != path or path == ".." or offset < 0 or length < 0:
        raise CheckpointError(
            f"{METADATA} points to {path!r}", why="data lies beside it", fix="Do not load this checkpoint"
        )
    transforms = record.state.get("transform_descriptors")
    return dcp_storage_info(path, offset, length, None if transforms is None else [str(name) for name in transforms])


def _typed(value: Any, kind: type[T], name: str) -> T:
    if not isinstance(value, kind):
        raise TypeError(f"its {name} is a {type(value).__name__}")
    return value


def _of(record: Any, name: str) -> None:
    if not isinstance(record, _Record) or type(record).__name__ != name:
        raise TypeError(f"it holds a {type(record).__name__} in place of {name}")
