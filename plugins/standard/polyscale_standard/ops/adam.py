"""The reference of ``fused_adam_``.

Notable: the moments move by a share of their distance from the new value (``lerp``), which loses less than
``beta * old + (1 - beta) * new`` when ``beta`` is near 1, because both factors are rounded there.

Kingma and Ba 2015, "Adam", Algorithm 1; Loshchilov and Hutter 2019, "Decoupled Weight Decay Regularization",
Algorithm 2.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from polyscale_standard.ops.checks import check_adam

if TYPE_CHECKING:
    import torch


def fused_adam_(
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
    """Do one update of Adam, or with ``decoupled`` of AdamW, in place, over tensors of one shape and device.

    Args:
        param: masters, fp32 or fp64; of narrower dtypes the computation is in fp32, and its results are rounded.
        exp_avg: first moment, of the dtype of ``param``.
        exp_avg_sq: second moment, likewise.
        grad: gradient, of any floating dtype; it is not changed.
        copy: receives the new parameter, rounded to its own dtype.
        lr: learning rate.
        beta1: decay rate of the first moment.
        beta2: decay rate of the second moment.
        eps: added to the root of the corrected second moment.
        weight_decay: acts on the parameter, times ``lr``, where ``decoupled``; else it is added to the gradient.
        decoupled: AdamW, not Adam.
        step: number of this update, from 1.
        grad_scale: the gradient is multiplied by it first; negative to ascend.
        bias_correction: moments are divided by ``1 - beta ** step``.

    Raises:
        PolyscaleError: an argument is wrong; named.
    """
    written = {"param": param, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    check_adam("fused_adam_", written if copy is None else {**written, "copy": copy}, grad, (beta1, beta2), step)
    bias1 = 1.0 - beta1**step if bias_correction else 1.0
    bias2 = 1.0 - beta2**step if bias_correction else 1.0
    kept = (param, exp_avg, exp_avg_sq)
    if param.dtype.itemsize < 4:  # which would round eps and small second moments to zero
        param, exp_avg, exp_avg_sq = (tensor.float() for tensor in kept)
    grad = grad.to(param.dtype)
    if grad_scale != 1.0:
        grad = grad * grad_scale
    if weight_decay and not decoupled:
        grad = grad.add(param, alpha=weight_decay)
    exp_avg.lerp_(grad, 1.0 - beta1)
    exp_avg_sq.lerp_(grad.square(), 1.0 - beta2)
    denominator = exp_avg_sq.sqrt().div_(math.sqrt(bias2)).add_(eps)
    if weight_decay and decoupled:
        param.mul_(1.0 - lr * weight_decay)
    param.addcdiv_(exp_avg, denominator, value=-lr / bias1)
    if param is not kept[0]:
        for tensor, result in zip(kept, (param, exp_avg, exp_avg_sq), strict=True):
            tensor.copy_(result)
    if copy is not None:
        copy.copy_(kept[0])
