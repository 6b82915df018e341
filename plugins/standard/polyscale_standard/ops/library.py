"""The declarations: name, schema, reference.

Notable: four ops cover what flat buffers need. ``add_scaled_`` is also a copy with conversion (alpha 1, beta 0), a
scaled conversion (beta 0) and a scaling in place (source and target the same tensor, beta 0).
"""

from __future__ import annotations

from collections.abc import Sequence

from polyscale.hooks import PluginContext, hookimpl
from polyscale.interfaces.op import Kernel, KernelModule, Op, OpLibrary
from polyscale_standard.ops.adam import fused_adam_
from polyscale_standard.ops.elementwise import add_scaled_, fill_
from polyscale_standard.ops.sums import sum_of_squares

_OPS = (
    Op(
        "fused_adam_",
        "(Tensor(a!) param, Tensor(b!) exp_avg, Tensor(c!) exp_avg_sq, Tensor grad, Tensor(d!)? copy=None, *, "
        "float lr, float beta1=0.9, float beta2=0.999, float eps=1e-8, float weight_decay=0.0, bool decoupled=True, "
        "int step, float grad_scale=1.0, bool bias_correction=True) -> ()",
        fused_adam_,
    ),
    Op("sum_of_squares", "(Tensor[] tensors) -> (Tensor, Tensor)", sum_of_squares),
    Op("add_scaled_", "(Tensor(a!) target, Tensor source, float alpha=1.0, float beta=1.0) -> ()", add_scaled_),
    Op("fill_", "(Tensor(a!) target, float value) -> ()", fill_),
)


class StandardOps:
    """Ops with references, and no kernels."""

    name = "standard"

    def ops(self) -> Sequence[Op]:
        """See :class:`polyscale.interfaces.op.OpLibrary`."""
        return _OPS

    def modules(self) -> Sequence[KernelModule]:
        """See :class:`polyscale.interfaces.op.OpLibrary`."""
        return ()

    def kernels(self) -> Sequence[Kernel]:
        """See :class:`polyscale.interfaces.op.OpLibrary`."""
        return ()


class StandardOpsPlugin:
    """Ops with PyTorch references."""

    interface_version = (1, 0)

    @hookimpl
    def polyscale_op(self, context: PluginContext) -> OpLibrary:
        """Hand over the declarations."""
        return StandardOps()
