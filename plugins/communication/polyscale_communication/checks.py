"""What is checked on this rank before ranks compare what they call."""

from __future__ import annotations

import torch


def check_host(tensor: torch.Tensor) -> None:
    """Refuse tensors of devices."""
    if not tensor.is_cpu:
        raise ValueError(f"shm moves tensors of the host, and was given one on {tensor.device}")
    if tensor.layout != torch.strided:
        raise ValueError(f"shm moves dense tensors, and was given one of layout {tensor.layout}")


def contiguous(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor; refuse one of a device, or that is not contiguous."""
    check_host(tensor)
    if not tensor.is_contiguous():
        raise ValueError("Tensors must be contiguous")
    return tensor


def copied(tensor: torch.Tensor, *, filled: bool) -> torch.Tensor:
    """The tensor where it is contiguous, else a contiguous one of its size, ``filled`` with what it has."""
    if tensor.is_contiguous() or filled:
        return tensor.contiguous()
    return torch.empty(tensor.shape, dtype=tensor.dtype)


def check_peer(what: str, peer: int, rank: int, size: int) -> None:
    """Refuse ranks that are not in the group, and this one."""
    if not 0 <= peer < size or peer == rank:
        raise ValueError(f"{what}: rank {peer} of the group, from rank {rank} of {size}")


def check_root(what: str, root: int, size: int) -> int:
    """The root; refuse one that is not in the group, which torch lets through."""
    if not 0 <= root < size:
        raise ValueError(f"{what}: root {root} in a group of {size} ranks; valid are 0 to {size - 1}")
    return root
