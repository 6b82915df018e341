"""The functions that torch calls in place of the references, for tensors of the CPU."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch

from polyscale_standard.ops.raw import SUMMED_TYPES, RawKernels, addresses_of
from polyscale_standard.ops.sums import check_sum_of_squares, sum_of_squares


class Wrappers(RawKernels):
    """The ops over the extension that ``kernels/binding.cpp`` defines; they use as many threads as torch does."""

    def call(self, function: Callable[..., Any], tensor: torch.Tensor, *arguments: Any) -> Any:
        """See :class:`polyscale_standard.ops.raw.RawKernels`."""
        return function(*arguments, torch.get_num_threads())

    def sum_of_squares(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """See :func:`polyscale_standard.ops.sums.sum_of_squares`."""
        check_sum_of_squares(tensors)
        if any(tensor.dtype not in SUMMED_TYPES for tensor in tensors):
            return sum_of_squares(tensors)
        dense = [tensor.detach().contiguous() for tensor in tensors]
        table = array("q", chain.from_iterable(addresses_of(dense)))
        total, finite = self.call(self.extension.sum_of_squares, dense[0], table.buffer_info()[0], len(dense))
        return torch.tensor(total, dtype=torch.float64), torch.tensor(finite)
