"""What is checked on this rank before a collective starts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from polyscale.errors import PolyscaleError

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup


def world_of(what: str, group: ProcessGroup | None) -> int:
    """Size of the group.

    Raises:
        PolyscaleError: there is no default group, or this rank is not in ``group``.
    """
    import torch.distributed as dist

    if not dist.is_initialized():
        raise PolyscaleError(what, why="There is no process group", fix="Call polyscale.initialize first")
    world = dist.get_world_size(group)
    if world < 1:
        raise PolyscaleError(what, why=f"rank {dist.get_rank()} is not a member of the group")
    return world


def check_peer(what: str, rank: int, group: ProcessGroup | None, *, other: bool = False) -> None:
    """Refuse a global rank that is not in the group, or, where it must be an ``other`` one, this rank itself."""
    import torch.distributed as dist

    world_of(what, group)
    ranks = dist.get_process_group_ranks(group)
    if rank not in ranks:
        raise PolyscaleError(f"{what} with rank {rank}", why=f"The group holds ranks {_spans(ranks)}")
    if other and rank == dist.get_rank():
        raise PolyscaleError(f"{what} with rank {rank}", why="That is this rank itself")


def _spans(ranks: Sequence[int]) -> str:
    shown = ", ".join(str(rank) for rank in ranks[:16])
    return shown if len(ranks) <= 16 else f"{shown}, ... ({len(ranks)} in all)"


def check_contiguous(what: str, *tensors: torch.Tensor) -> None:
    """Refuse tensors that are not contiguous."""
    for tensor in tensors:
        if not tensor.is_contiguous():
            raise PolyscaleError(
                f"{what} of a tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()}",
                why="It is not contiguous",
                fix="Give tensor.contiguous()",
            )


def check_sizes(what: str, *, whole: torch.Tensor, part: torch.Tensor, world: int) -> None:
    """Refuse all but contiguous tensors of one dtype and device, of which ``whole`` is ``world`` times ``part``."""
    check_contiguous(what, whole, part)
    if whole.dtype != part.dtype or whole.device != part.device:
        raise PolyscaleError(
            f"{what} between {whole.dtype} on {whole.device} and {part.dtype} on {part.device}",
            why="Dtypes and devices must be equal",
        )
    if whole.numel() != world * part.numel():
        raise PolyscaleError(
            f"{what} with {whole.numel()} elements on one side and {part.numel()} on the other",
            why=f"Over {world} ranks the larger side needs {world * part.numel()}",
        )
