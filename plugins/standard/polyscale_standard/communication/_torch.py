"""What process groups written in Python need of torch's c10d that is private, or only in its extension module."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from torch._C import _distributed_c10d as _c10d

# Any: torch's stubs lack gloo's collectives, and give overloads that no override can match.
ProcessGroup: Any = _c10d.ProcessGroup
ProcessGroupGloo: Any = _c10d.ProcessGroupGloo
PrefixStore: Any = _c10d.PrefixStore
Work: Any = _c10d.Work


def gloo(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """A gloo group; collective."""
    return ProcessGroupGloo(store, rank, size, timeout=timeout)


def _made(options: Any, **values: Any) -> Any:
    for name, value in values.items():
        setattr(options, name, value)
    return options


def allreduce_options(operation: Any) -> Any:
    """Options of ``allreduce``."""
    return _made(_c10d.AllreduceOptions(), reduceOp=operation)


def reduce_options(operation: Any, root: int) -> Any:
    """Options of ``reduce``."""
    return _made(_c10d.ReduceOptions(), reduceOp=operation, rootRank=root)


def reduce_scatter_options(operation: Any) -> Any:
    """Options of ``_reduce_scatter_base``."""
    return _made(_c10d.ReduceScatterOptions(), reduceOp=operation)


def broadcast_options(root: int) -> Any:
    """Options of ``broadcast``."""
    return _made(_c10d.BroadcastOptions(), rootRank=root, rootTensor=0)


def gather_options(root: int) -> Any:
    """Options of ``gather``."""
    return _made(_c10d.GatherOptions(), rootRank=root)


def scatter_options(root: int) -> Any:
    """Options of ``scatter``."""
    return _made(_c10d.ScatterOptions(), rootRank=root)


def allgather_options() -> Any:
    """Options of ``allgather``."""
    return _c10d.AllgatherOptions()


def all_to_all_options() -> Any:
    """Options of ``alltoall``."""
    return _c10d.AllToAllOptions()
