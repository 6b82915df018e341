"""From tensors to addresses: what torch calls in place of a reference, over an extension that knows no torch.

Notable: it makes the references' own checks, then hands the extension addresses, sizes and numbers; what kernels do not
cover (fp64 masters, other strides) goes to the reference. Kernels write past autograd, so the versions of what they
wrote are counted here. A package with kernels says in :meth:`RawKernels.call` how its extension is called.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from polyscale_standard.ops.adam import fused_adam_
from polyscale_standard.ops.checks import check_adam, check_floating
from polyscale_standard.ops.elementwise import add_scaled_, check_add_scaled, fill_

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Element types of the kernels by their number."""
SUMMED_TYPES = {**TYPES, torch.float64: 3}
"""Those of which sums of squares are taken."""
_NO_TYPE = -1


class RawKernels:
    """The elementwise ops; arguments and errors are those of the references.

    The extension has ``adam``, ``add_scaled`` and ``fill``; ``kernels/binding.cpp`` of polyscale-cpu-ops is an example.
    """

    def __init__(self, extension: Any) -> None:
        """``extension``: the imported module."""
        self.extension = extension

    def call(self, function: Callable[..., Any], tensor: torch.Tensor, *arguments: Any) -> Any:
        """Call a function of the extension for the device of ``tensor``, with what it needs behind ``arguments``."""
        raise NotImplementedError

    def fused_adam_(
        self,
        param: torch.Tensor,
        exp_avg: torch.Tensor,
        exp_avg_sq: torch.Tensor,
        grad: torch.Tensor,
        copy: torch.Tensor | None = None,
        *,
        lr: float,
        beta1: float = 0.9,
        beta2: float = 0.999,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        decoupled: bool = True,
        step: int,
        grad_scale: float = 1.0,
        bias_correction: bool = True,
    ) -> None:
        """See :func:`polyscale_standard.ops.adam.fused_adam_`; here for fp32 masters."""
        if not covered(param, exp_avg, exp_avg_sq, grad, *(() if copy is None else (copy,)), master=param):
            fused_adam_(
                param, exp_avg, exp_avg_sq, grad, copy, lr=lr, beta1=beta1, beta2=beta2, eps=eps,
                weight_decay=weight_decay, decoupled=decoupled, step=step, grad_scale=grad_scale,
                bias_correction=bias_correction,
            )  # fmt: skip
            return
        written = {"param": param, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
        if copy is not None:
            written["copy"] = copy
        check_adam("fused_adam_", written, grad, (beta1, beta2), step)
        self.call(
            self.extension.adam, param, param.data_ptr(), exp_avg.data_ptr(), exp_avg_sq.data_ptr(), grad.data_ptr(),
            TYPES[grad.dtype], 0 if copy is None else copy.data_ptr(), _NO_TYPE if copy is None else TYPES[copy.dtype],
            param.numel(), lr, beta1, beta2, eps, weight_decay, decoupled, step if bias_correction else 0, grad_scale,
        )  # fmt: skip
        count_writes(*written.values())

    def add_scaled_(self, target: torch.Tensor, source: torch.Tensor, alpha: float = 1.0, beta: float = 1.0) -> None:
        """See :func:`polyscale_standard.ops.elementwise.add_scaled_`."""
        if not covered(target, source):
            add_scaled_(target, source, alpha, beta)
            return
        check_add_scaled(target, source)
        addresses = (target.data_ptr(), TYPES[target.dtype], source.data_ptr(), TYPES[source.dtype])
        self.call(self.extension.add_scaled, target, *addresses, target.numel(), alpha, beta)
        count_writes(target)

    def fill_(self, target: torch.Tensor, value: float) -> None:
        """See :func:`polyscale_standard.ops.elementwise.fill_`."""
        check_floating("fill_", "target", target)
        if not covered(target):
            fill_(target, value)
            return
        self.call(self.extension.fill, target, target.data_ptr(), TYPES[target.dtype], target.numel(), value)
        count_writes(target)


def covered(*tensors: torch.Tensor, master: torch.Tensor | None = None) -> bool:
    """Whether kernels take tensors of these dtypes and strides; the reference judges the others.

    Args:
        tensors: the arguments.
        master: the one that has to be fp32.
    """
    if master is not None and master.dtype != torch.float32:
        return False
    return all(tensor.dtype in TYPES and tensor.is_contiguous() for tensor in tensors)


def count_writes(*tensors: torch.Tensor) -> None:
    """Tell autograd that ``tensors`` were written, so that a graph that saved one of them notices."""
    torch.autograd.graph.increment_version([tensor for tensor in tensors if not tensor.is_inference()])


def addresses_of(tensors: Sequence[torch.Tensor]) -> list[tuple[int, int, int]]:
    """Address, elements and type of each of ``tensors``, which are contiguous."""
    return [(tensor.data_ptr(), tensor.numel(), SUMMED_TYPES[tensor.dtype]) for tensor in tensors]
