"""What process groups written in Python check of a call before ranks compare what they call."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def check_list(what: str, tensors: Sequence[torch.Tensor], size: int) -> None:
    """Refuse lists that do not have a tensor for each rank."""
    if len(tensors) != size:
        raise ValueError(f"{what}: {len(tensors)} tensors for {size} ranks")


def check_same(like: torch.Tensor, *lists: Sequence[torch.Tensor]) -> None:
    """The first list must match in dtype and size, further ones in dtype alone."""
    for index, tensors in enumerate(lists):
        for tensor in tensors:
            if tensor.dtype != like.dtype or (index == 0 and tensor.numel() != like.numel()):
                one, two = ((each.numel(), each.dtype) for each in (like, tensor))
                raise ValueError(f"a collective of {one[0]} elements of {one[1]} was given {two[0]} of {two[1]}")


def check_parts(what: str, *, whole: torch.Tensor, part: torch.Tensor, size: int) -> None:
    """Refuse all but tensors of one dtype, of which ``whole`` is ``size`` times ``part``."""
    if whole.dtype != part.dtype:
        raise ValueError(f"{what}: tensors of {whole.dtype} and {part.dtype}")
    if whole.numel() != size * part.numel():
        raise ValueError(f"{what}: {whole.numel()} elements are not {size} times {part.numel()}")


def elements(tensor: torch.Tensor, rows: Sequence[int], size: int) -> list[int]:
    """Elements of each piece of an all_to_all: of equal parts where ``rows`` is empty."""
    if not rows:
        if tensor.numel() % size:
            raise ValueError(f"all_to_all: {tensor.numel()} elements cannot be divided by {size} ranks")
        return [tensor.numel() // size] * size
    length = tensor.size(0) if tensor.dim() else 1
    if len(rows) != size or sum(rows) != length:
        raise ValueError(f"all_to_all: pieces of {list(rows)} rows of {length} for {size} ranks")
    per_row = tensor.numel() // length if length else 0
    return [count * per_row for count in rows]
