"""Blobs: nested plain values with tensors in one file, written so that reading them executes nothing.

Notable: what ``torch.load(weights_only=True)`` would refuse later is refused at save time, with its place in the value,
before anything is written.
"""

from __future__ import annotations

import errno
import io
import pickle
from collections import Counter, OrderedDict
from os import PathLike
from pathlib import Path
from typing import Any

from polyscale.checkpoint.durable import write_bytes
from polyscale.checkpoint.faults import failure
from polyscale.errors import CheckpointError

_PLAIN = (type(None), bool, int, float, complex, str, bytes, bytearray)
_SEQUENCES = (list, tuple, set)
_MAPPINGS = (dict, OrderedDict, Counter)
_DAMAGED = "Load another checkpoint (tag=...), or copy this file again from where it is whole"
_ALLOWED = "tensors, numbers, strings, bytes, None, lists, tuples, sets and dicts"


def check_blob(value: Any, name: str = "client_state") -> None:
    """Refuse what could not be loaded again.

    Args:
        value: what is to be saved.
        name: how to call it in an error.

    Raises:
        CheckpointError: names the place and the type that is not allowed, and what is.
    """
    _check(value, name, ())


def save_blob(path: str | PathLike[str], value: Any, *, name: str | None = None) -> None:
    """Write ``value`` to ``path`` and fsync it.

    Raises:
        CheckpointError: it holds a type that is not allowed (nothing is written), or the system refuses.
    """
    import torch

    check_blob(value, name or Path(path).stem)
    buffer = io.BytesIO()  # in memory first: torch.save into a file hides why the system refused
    torch.save(value, buffer)
    try:
        write_bytes(Path(path), buffer.getvalue())
    except OSError as error:
        raise failure(path, "written", error) from error


def load_blob(path: str | PathLike[str]) -> Any:
    """Read what ``save_blob`` wrote; tensors are on the host. Executes nothing from the file.

    Raises:
        CheckpointError: it is missing, damaged, or holds what is not allowed.
    """
    import torch

    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        why = f"the file is damaged, or holds something other than {_ALLOWED}"
        raise CheckpointError(f"{path} cannot be read", why=why, fix=_DAMAGED) from error
    except Exception as error:  # damaged archives raise RuntimeError, EOFError, ValueError, KeyError, ...
        # A file cut off makes torch seek to before its start, which the system calls an invalid argument.
        if isinstance(error, OSError) and error.errno != errno.EINVAL:
            raise failure(path, "read", error) from error
        size = f"{Path(path).stat().st_size:,} bytes"
        why = f"the file is damaged, perhaps cut off ({size})"
        raise CheckpointError(f"{path} cannot be read", why=why, fix=_DAMAGED) from error


def _check(value: Any, where: str, above: tuple[int, ...]) -> None:
    import torch

    kind = type(value)
    if kind in _PLAIN or kind in (torch.dtype, torch.Size, torch.device):
        return
    if kind in (torch.Tensor, torch.nn.Parameter):
        if value.device.type == "meta":
            raise CheckpointError(f"{where} is on the meta device", why="it has no values", fix="Materialise it first")
        return
    if kind not in (*_SEQUENCES, *_MAPPINGS):
        raise CheckpointError(
            f"{where} is a {kind.__module__}.{kind.__qualname__}",
            why="loading it would execute code of the file",
            fix=f"Save {_ALLOWED}" + _hint(value),
        )
    if id(value) in above or len(above) > 200:
        raise CheckpointError(f"{where} holds itself, or is too deep", why="it could not be loaded", fix="Flatten it")
    above = (*above, id(value))
    if kind in _MAPPINGS:
        for key, item in value.items():
            _check(key, f"a key of {where}", above)
            _check(item, f"{where}[{key!r}]", above)
    else:
        for index, item in enumerate(value):
            _check(item, f"{where}[{index}]", above)


def _hint(value: Any) -> str:
    kind = type(value)
    if kind.__module__ == "numpy":
        return "; torch.from_numpy(array) makes a tensor, .item() a number"
    if hasattr(value, "state_dict"):
        return "; take its state_dict(), or use engine.track"
    if hasattr(value, "to_local"):
        return "; take its full_tensor()"
    return ""
