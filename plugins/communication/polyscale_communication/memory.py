"""Buffers that other ranks can map, as tensors.

Notable: a buffer lies in a memfd segment of this process and goes back to its pool with the last view of the tensor;
the next one of its size faults no pages in. A forked child shares it with its parent, where ordinary memory would be
copied.
"""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from polyscale.errors import BuildError, PolyscaleError, UnsupportedError

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

logger = logging.getLogger("polyscale")


def allocate(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """An uninitialised 1-D tensor of the host that peers can read in place; ordinary memory where that is refused."""
    import torch

    if numel < 0:
        raise PolyscaleError(f"A buffer of {numel} elements", why="It cannot be negative")
    if numel == 0:
        return torch.empty(0, dtype=dtype)
    from polyscale_shm import native

    try:
        memory = native().allocate(numel * dtype.itemsize)
    except BuildError:  # the group has said why it uses gloo
        return torch.empty(numel, dtype=dtype)
    except OSError as error:
        _say_once(f"shm: buffers lie in ordinary memory, because shared memory is refused: {error}")
        return torch.empty(numel, dtype=dtype)
    return tensor_over(memory, numel, dtype)


def shared(numel: int, dtype: torch.dtype, group: ProcessGroup | None) -> torch.Tensor:
    """One piece of memory that all ranks of the group have, as a 1-D tensor of zeros. Collective.

    Raises:
        UnsupportedError: the group spans hosts, its memory is forbidden, or one rank cannot have it; on every rank.
    """
    import torch.distributed as dist

    found: Any = group if group is not None else dist.group.WORLD
    what = f"{numel} elements of {dtype} that the ranks of a group share"
    transport = getattr(found, "transport", None)
    if transport is None:
        why = getattr(found, "why_gloo", "") or "The group is not one of shm"
        raise UnsupportedError(what, why=why, fix="Give a group of backend 'shm' whose ranks are on one host")
    from polyscale_shm import native

    try:
        memory = transport.shared(max(numel, 1) * dtype.itemsize, found.timeout_s)
    except native().NotShared as error:
        raise UnsupportedError(what, why=str(error)) from error
    return tensor_over(memory, numel, dtype)


def tensor_over(memory: Any, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor over a buffer of the transport, which it keeps."""
    import torch

    if numel == 0:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=numel)


@lru_cache(maxsize=8)
def _say_once(message: str) -> None:
    logger.warning("%s", message)
