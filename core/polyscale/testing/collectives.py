"""Count the collectives that code launches, by kind, size and order.

Notable: the functions of ``torch.distributed`` are wrapped for a while, under the names of torch 2.13
(``all_gather_single``) and of earlier versions (``all_gather_into_tensor``); one that calls another counts once. Code
that took a function by ``from torch.distributed import all_reduce`` before is not seen.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

KINDS = {
    "all_gather": ("all_gather_single", "all_gather_into_tensor", "_all_gather_base", "all_gather"),
    "reduce_scatter": ("reduce_scatter_single", "reduce_scatter_tensor", "_reduce_scatter_base", "reduce_scatter"),
    "all_reduce": ("all_reduce", "all_reduce_coalesced"),
    "all_to_all": ("all_to_all_single", "all_to_all"),
    "broadcast": ("broadcast",),
    "reduce": ("reduce",),
    "gather": ("gather",),
    "scatter": ("scatter",),
    "barrier": ("barrier", "monitored_barrier"),
    "send": ("send", "isend"),
    "recv": ("recv", "irecv"),
    "object": ("all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list"),
}


@dataclass(frozen=True)
class Collective:
    """One launch.

    Attributes:
        kind: a key of ``KINDS``: "all_gather", "reduce_scatter", "all_reduce", ...
        numel: elements of the largest tensor given (for all_gather: of all ranks together); 0 without a tensor.
        dtype: its dtype as text ("float32"); "" without a tensor.
    """

    kind: str
    numel: int = 0
    dtype: str = ""


@dataclass
class Collectives:
    """The launches so far, in order."""

    launched: list[Collective] = field(default_factory=list)

    @property
    def counts(self) -> Counter[str]:
        """Launches by kind."""
        return Counter(launch.kind for launch in self.launched)

    def __getitem__(self, kind: str) -> int:
        if kind not in KINDS:
            raise KeyError(f"{kind!r} is no kind of collective; the kinds are {', '.join(KINDS)}")
        return self.counts[kind]

    def __len__(self) -> int:
        return len(self.launched)

    def clear(self) -> None:
        """Forget the launches so far."""
        self.launched.clear()


@contextlib.contextmanager
def count_collectives() -> Iterator[Collectives]:
    """Record the collectives that this rank launches inside the block."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    record = Collectives()
    depth = [0]
    with contextlib.ExitStack() as undo:
        for kind, names in KINDS.items():
            for name in names:
                for module in (dist, distributed_c10d):
                    if hasattr(module, name):
                        undo.callback(setattr, module, name, getattr(module, name))
                        setattr(module, name, _wrap(getattr(module, name), kind, record, depth))
        yield record


def _wrap(function: Callable[..., Any], kind: str, record: Collectives, depth: list[int]) -> Callable[..., Any]:
    @functools.wraps(function)
    def counted(*args: Any, **kwargs: Any) -> Any:
        if depth[0] == 0:
            record.launched.append(_describe(kind, [*args, *kwargs.values()]))
        depth[0] += 1
        try:
            return function(*args, **kwargs)
        finally:
            depth[0] -= 1

    return counted


def _describe(kind: str, values: list[Any]) -> Collective:
    import torch

    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    if not tensors:
        return Collective(kind)
    largest = max(tensors, key=torch.Tensor.numel)
    return Collective(kind, largest.numel(), str(largest.dtype).removeprefix("torch."))
