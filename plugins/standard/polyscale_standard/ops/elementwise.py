"""The references of ``add_scaled_`` and ``fill_``.

Notable: they compute in fp32, or fp64 where a tensor is fp64, and round once, when they write.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from polyscale_standard.ops.checks import check_alike, check_apart, check_floating

if TYPE_CHECKING:
    import torch


def check_add_scaled(target: torch.Tensor, source: torch.Tensor) -> None:
    """Check the arguments of ``add_scaled_``.

    Raises:
        PolyscaleError: an argument is wrong; named.
    """
    check_alike("add_scaled_", {"target": target, "source": source})
    same = target.dtype == source.dtype
    check_apart("add_scaled_", {"target": target}, {"source": source}, same=same)


def add_scaled_(target: torch.Tensor, source: torch.Tensor, alpha: float = 1.0, beta: float = 1.0) -> None:
    """``target = beta * target + alpha * source``, each of a floating dtype of its own.

    Args:
        target: is written; with ``beta`` 0 it is not read, so NaN in it does not matter.
        source: of the same shape and device; it may be ``target`` itself.
        alpha: factor of ``source``.
        beta: factor of ``target``.

    Raises:
        PolyscaleError: an argument is wrong; named.
    """
    import torch

    check_add_scaled(target, source)
    wide = torch.float64 if torch.float64 in (target.dtype, source.dtype) else torch.float32
    result = source.to(wide) * alpha
    if beta != 0.0:
        result.add_(target.to(wide), alpha=_fitting(beta, wide))
    target.copy_(result)


def fill_(target: torch.Tensor, value: float) -> None:
    """Write ``value``, rounded to the dtype of ``target``, into every element; overflow becomes infinity.

    Raises:
        PolyscaleError: ``target`` is not of floating point.
    """
    check_floating("fill_", "target", target)
    import torch

    wide = torch.float64 if target.dtype == torch.float64 else torch.float32
    target.copy_(target.new_full((), _fitting(value, wide), dtype=wide))


def _fitting(value: float, dtype: torch.dtype) -> float:
    """``value``, infinite where ``dtype`` does not reach so far: torch refuses to convert such numbers."""
    import torch

    return math.copysign(math.inf, value) if abs(value) > torch.finfo(dtype).max else value
