"""Reading ``.metadata``, which is a pickle, without letting it execute anything.

Notable: the unpickler knows by exact module and name the classes that DCP writes there (measured on what torch saves:
tensors of all kinds, nested dicts, non-tensors) and torch's dtypes; any other name in the file ends the reading. What
comes out is then checked: types, offsets inside the tensor, data files that lie in the directory and are long enough.
"""

from __future__ import annotations

import io
import pickle
from os import PathLike
from pathlib import Path, PurePath
from typing import Any

import torch
from polyscale._torch import dcp_metadata_names
from polyscale.checkpoint.faults import failure
from polyscale.errors import CheckpointError
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

METADATA = ".metadata"

_PATHS = frozenset({"Path", "PosixPath", "WindowsPath", "PurePath", "PurePosixPath", "PureWindowsPath"})


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
        metadata = _Unpickler(io.BytesIO(data)).load()
        _check(metadata)
    except CheckpointError:
        raise
    except Exception as error:  # a damaged pickle raises nearly anything
        why = f"it is damaged ({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''})"
        raise CheckpointError(f"{path} cannot be read", why=why, fix="Load another checkpoint") from error
    assert isinstance(metadata, Metadata)
    return metadata


def check_files(directory: str | PathLike[str], metadata: Metadata, used: set[Any]) -> None:
    """Check that the data files hold what the ``used`` storage indices point to.

    Raises:
        CheckpointError: a file is missing, too short, or not in the directory.
    """
    ends: dict[str, int] = {}
    for index in used:
        info = metadata.storage_data[index]
        name = info.relative_path
        if PurePath(name).name != name or info.offset < 0 or info.length < 0:
            raise CheckpointError(
                f"{Path(directory, METADATA)} cannot be used",
                why=f"it points to {name!r}",
                fix="Load another checkpoint",
            )
        ends[name] = max(ends.get(name, 0), info.offset + info.length)
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


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in dcp_metadata_names():
            return super().find_class(module, name)
        if module in ("pathlib", "pathlib._local") and name in _PATHS:
            return PurePath  # only told, never opened; and a PosixPath cannot be made on Windows
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise CheckpointError(
            f"{METADATA} names '{module}.{name}'",
            why="DCP writes no such thing there, and reading it would execute code of the file",
            fix="Do not load this checkpoint",
        )

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("persistent ids are not used")


def _check(metadata: Any) -> None:
    if not isinstance(metadata, Metadata):
        raise TypeError(f"it holds a {type(metadata).__name__}")
    if not isinstance(metadata.state_dict_metadata, dict) or not isinstance(metadata.storage_data, dict):
        raise TypeError("its tables are no dicts")
    for name, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            _check_tensor(name, entry)
    for info in metadata.storage_data.values():
        if not (isinstance(info.relative_path, str) and isinstance(info.offset, int) and isinstance(info.length, int)):
            raise TypeError("a storage entry is damaged")


def _check_tensor(name: str, entry: TensorStorageMetadata) -> None:
    if not isinstance(entry.properties.dtype, torch.dtype):
        raise TypeError(f"'{name}' has no dtype")
    for chunk in entry.chunks:
        if not len(chunk.offsets) == len(chunk.sizes) == len(entry.size):
            raise ValueError(f"'{name}' has a block of other dimensions")
        for offset, size, whole in zip(chunk.offsets, chunk.sizes, entry.size, strict=True):
            if offset < 0 or size < 0 or offset + size > whole:
                raise ValueError(f"'{name}' has a block outside of it")
