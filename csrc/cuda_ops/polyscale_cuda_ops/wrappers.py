"""The functions that torch calls in place of the references, for tensors of CUDA devices.

Notable: everything is queued on the current stream of the tensors' device, and nothing waits for the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from polyscale_standard.ops.raw import SUMMED_TYPES, RawKernels, addresses_of
from polyscale_standard.ops.sums import check_sum_of_squares, sum_of_squares


class Wrappers(RawKernels):
    """The ops over the extension that ``kernels/binding.cpp`` defines."""

    def call(self, function: Callable[..., Any], tensor: torch.Tensor, *arguments: Any) -> Any:
        """See :class:`polyscale_standard.ops.raw.RawKernels`."""
        with torch.cuda.device(tensor.device):
            return function(*arguments, torch.cuda.current_stream().cuda_stream)

    def sum_of_squares(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """See :func:`polyscale_standard.ops.sums.sum_of_squares`."""
        check_sum_of_squares(tensors)
        if any(tensor.dtype not in SUMMED_TYPES for tensor in tensors):
            return sum_of_squares(tensors)
        dense = [tensor.detach().contiguous() for tensor in tensors]
        counts = [self.extension.partial_count(tensor.numel()) for tensor in dense]
        device, parts = dense[0].device, sum(counts)
        sums = torch.empty(parts, dtype=torch.float64, device=device)
        flags = torch.empty(parts, dtype=torch.int32, device=device)
        total = torch.empty((), dtype=torch.float64, device=device)
        finite = torch.empty((), dtype=torch.bool, device=device)
        place = 0
        for tensor, address, count in zip(dense, addresses_of(dense), counts, strict=True):
            results = (sums[place:].data_ptr(), flags[place:].data_ptr())
            self.call(self.extension.partial_squares, tensor, address[0], address[2], address[1], *results)
            place += count
        self.call(
            self.extension.total_squares,
            total,
            sums.data_ptr(),
            flags.data_ptr(),
            parts,
            total.data_ptr(),
            finite.data_ptr(),
        )
        return total, finite
