"""Sums of squares of many tensors in one go: what norms of whole tensors are made of.

Notable: torch adds the squares of fp32 tensors in fp32, on the CPU one after another: the norm of ten million random
elements was off by 4e-4 there. So rows of ``ROW`` elements are summed by themselves, and their sums added in fp64,
which takes no longer and was right to 4e-7 at worst. Other devices sum in trees.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from polyscale._torch import foreach

ROW = 1024


def sums_of_squares(tensors: Sequence[torch.Tensor], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return the sum of squares of each tensor, 1-D of ``dtype`` on ``device``.

    Args:
        tensors: floating point, of any shape, on ``device``; empty ones give 0.
        dtype: fp64 where the device has it, else fp32.
        device: where they are.
    """
    sums = torch.zeros(len(tensors), dtype=dtype, device=device)
    owners: list[int] = []
    pieces: list[torch.Tensor] = []
    for owner, tensor in enumerate(tensors):
        flat = tensor.detach().reshape(-1)
        flat = flat.float() if flat.dtype.itemsize < 4 else flat
        rows = flat.numel() // ROW if device.type == "cpu" else 0
        if rows > 1:
            of_rows = torch.linalg.vector_norm(flat[: rows * ROW].view(rows, ROW), dim=1)
            sums[owner] = of_rows.to(dtype).square_().sum()
            flat = flat[rows * ROW :]
        if flat.numel():
            owners.append(owner)
            pieces.append(flat)
    if pieces:
        norms = torch.stack([norm.to(dtype) for norm in foreach("norm")(pieces)])
        sums.index_add_(0, torch.tensor(owners, device=device), norms.square_())
    return sums
