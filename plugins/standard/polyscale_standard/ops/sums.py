"""The reference of ``sum_of_squares``.

Notable: fp64 throughout, so the squares of fp32 and narrower neither overflow nor vanish. A piece is converted at a
time, so no buffer is ever held twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from polyscale.errors import PolyscaleError
from polyscale_standard.ops.checks import check_floating

if TYPE_CHECKING:
    import torch

_PIECE = 1 << 22  # elements


def check_sum_of_squares(tensors: Sequence[torch.Tensor]) -> None:
    """Check the arguments of ``sum_of_squares``.

    Raises:
        PolyscaleError: there is no tensor, one is not of floating point, or they are on several devices.
    """
    op = "sum_of_squares"
    if not tensors:
        raise PolyscaleError(
            f"{op}: tensors=[]", why="the result is on the device of the first", fix="Give one or more"
        )
    for index, tensor in enumerate(tensors):
        check_floating(op, f"tensors[{index}]", tensor)
        if tensor.device != tensors[0].device:
            raise PolyscaleError(
                f"{op}: tensors[{index}] on {tensor.device}",
                why=f"tensors[0] is on {tensors[0].device}",
                fix="Call it once for each device",
            )


def sum_of_squares(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum of the squares of all elements, and whether every element is finite, in one pass.

    Args:
        tensors: one or more, of any floating dtype and shape, on one device.

    Returns:
        Two tensors of no dimension on that device: the sum (fp64) and the check (bool). The sum over fp64 elements may
        be infinite though they are finite.

    Raises:
        PolyscaleError: an argument is wrong; named.
    """
    import torch

    check_sum_of_squares(tensors)
    total = torch.zeros((), dtype=torch.float64, device=tensors[0].device)
    finite = torch.ones((), dtype=torch.bool, device=tensors[0].device)
    for tensor in tensors:
        for piece in torch.split(tensor.detach().reshape(-1), _PIECE):
            wide = piece.double()
            total += wide.square().sum()
            finite &= wide.isfinite().all()
    return total, finite
