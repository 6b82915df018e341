"""Reductions: what c10d's operations mean in terms of those that gloo has.

Notable: AVG is a sum and a division, PREMUL_SUM a multiplication and a sum, a sum of bool an "or": as nccl does.
Partial sums are rounded to the dtype of the tensor, as gloo adds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

REDUCIBLE = (
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
    torch.bool,
)
_BITS = ("band", "bor", "bxor")
_OF_BOOL = {"sum": "max", "product": "min"}


@dataclass(frozen=True)
class Reduction:
    """One reduction.

    Attributes:
        name: an element of ``signature.OPERATIONS``.
        gloo: the operation that gloo carries out.
        before: what inputs are multiplied by, or None.
        after: what the result is divided by.
    """

    name: str
    gloo: Any
    before: float | torch.Tensor | None = None
    after: int = 1

    def start(self, view: torch.Tensor, *, own: bool) -> torch.Tensor:
        """What to give to gloo for ``view``; changed in place where it is the caller's ``own`` memory."""
        if self.before is None:
            return view
        factor = self.before.to("cpu", view.dtype) if isinstance(self.before, torch.Tensor) else self.before
        return view.mul_(factor) if own else view * factor

    def finish(self, view: torch.Tensor) -> None:
        """Turn gloo's result into that of the operation, in place."""
        if self.after == 1:
            return
        if view.is_floating_point():
            view.div_(self.after)
        else:
            view.floor_divide_(self.after)


def reduction_of(operation: Any, dtype: torch.dtype, world: int) -> Reduction:
    """Translate c10d's ``ReduceOp``.

    Raises:
        RuntimeError: the dtype cannot be reduced, or not in this way.
    """
    kind = getattr(operation, "op", operation)
    name = kind.name.lower()
    short = str(dtype).removeprefix("torch.")
    if dtype not in REDUCIBLE or (name in _BITS and dtype.is_floating_point):
        raise RuntimeError(f"simccl does not support reductions ({name}) of {short}")
    if dtype == torch.bool:
        if name in ("avg", "premul_sum"):
            raise RuntimeError(f"simccl does not support reductions ({name}) of bool")
        return Reduction(name, getattr(dist.ReduceOp, _OF_BOOL.get(name, name).upper()))
    if name == "avg":
        return Reduction(name, dist.ReduceOp.SUM, after=world)
    if name == "premul_sum":
        return Reduction(name, dist.ReduceOp.SUM, before=_factor(operation))
    return Reduction(name, getattr(dist.ReduceOp, name.upper()))


def _factor(operation: Any) -> Any:
    factor = getattr(operation, "factor", None)  # since torch 2.13
    return operation.__getstate__()[1] if factor is None else factor
