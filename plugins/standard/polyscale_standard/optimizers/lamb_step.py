"""The optimizer class of LAMB.

Notable: everything but the norms is computed on local fragments. The norms of all weights and of all updates go through
the store together, so an update takes one all-reduce, however many groups there are. Updates of all parameters are kept
until then: one more tensor for each while a step runs.

You et al. 2020, "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes", Algorithm 2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from polyscale._torch import foreach
from polyscale_standard.optimizers.step_loop import StepLoop

if TYPE_CHECKING:
    from polyscale.parameters.store import ParameterStore

Groups = list[tuple[dict[str, Any], list[torch.Tensor]]]


class Lamb(StepLoop):
    """A step is collective.

    State: ``step`` (0-dimensional fp32, on the host), ``exp_avg`` and ``exp_avg_sq``, shaped like the local parameter.

    Attributes:
        trust_ratios: by parameter name, of the last step: what each update was multiplied by, beside the learning rate.
    """

    granularity = "norm"

    def __init__(self, params: list[Any], store: ParameterStore, **defaults: Any) -> None:
        """Make it.

        Args:
            params: groups whose ``params`` are (name, local parameter) pairs.
            store: gives norms of whole tensors.
            defaults: lr, betas, eps, weight_decay, bias_correction, eps_inside_sqrt, min_coeff, max_coeff.
        """
        super().__init__(params, defaults)
        self._store = store
        self.trust_ratios: dict[str, float] = {}

    def update_all(self, groups: Groups) -> None:
        """See :class:`~polyscale_standard.optimizers.step_loop.StepLoop`."""
        weights: dict[str, torch.Tensor] = {}
        updates: dict[str, torch.Tensor] = {}
        for group, params in groups:
            names = _names(group, params)
            weights.update(zip(names, params, strict=True))
            updates.update(zip(names, self._directions(group, params), strict=True))
        self.trust_ratios = self._ratios(groups, weights, updates)
        for group, params in groups:
            names = _names(group, params)
            steps = [updates[name] for name in names]
            foreach("mul_")(steps, [-float(group["lr"]) * self.trust_ratios[name] for name in names])
            foreach("add_")(params, steps)

    def _directions(self, group: dict[str, Any], params: list[torch.Tensor]) -> list[torch.Tensor]:
        """Move the moments on, and return Adam's direction plus weight decay, in new memory."""
        grads: list[Any] = [param.grad for param in params]
        first, second = self.buffers(params, "exp_avg"), self.buffers(params, "exp_avg_sq")
        counts = self.step_counts(params)
        foreach("add_")(counts, 1)
        beta1, beta2 = group["betas"]
        foreach("lerp_")(first, grads, 1 - beta1)
        foreach("mul_")(second, beta2)
        foreach("addcmul_")(second, grads, grads, 1 - beta2)
        steps = [int(count) for count in counts] if group["bias_correction"] else []
        corrections1 = [1 - beta1**step for step in steps] or [1.0] * len(params)
        corrections2 = [1 - beta2**step for step in steps] or [1.0] * len(params)
        directions: list[torch.Tensor] = foreach("div")(second, corrections2)
        if group["eps_inside_sqrt"]:
            foreach("add_")(directions, group["eps"])
        foreach("sqrt_")(directions)
        if not group["eps_inside_sqrt"]:
            foreach("add_")(directions, group["eps"])
        foreach("mul_")(directions, corrections1)
        foreach("reciprocal_")(directions)  # and a product: a quotient would be further memory
        foreach("mul_")(directions, first)
        if group["weight_decay"]:
            foreach("add_")(directions, params, alpha=group["weight_decay"])
        return directions

    def _ratios(
        self, groups: Groups, weights: dict[str, torch.Tensor], updates: dict[str, torch.Tensor]
    ) -> dict[str, float]:
        if not weights:  # then on every rank: a gradient is None on every rank or on none
            return {}
        of_weights, of_updates = self._store.norms(weights, updates)
        numbers = torch.stack([*of_weights.values(), *of_updates.values()]).tolist()
        bounds = [(group["min_coeff"], group["max_coeff"]) for group, params in groups for _ in params]
        pairs = zip(numbers[: len(weights)], numbers[len(weights) :], strict=True)
        ratios = [trust_ratio(*pair, *bound) for pair, bound in zip(pairs, bounds, strict=True)]
        return dict(zip(weights, ratios, strict=True))


def trust_ratio(weight: float, update: float, low: float, high: float) -> float:
    """The norm of the weight over that of its update, between ``low`` and ``high``; 1 where one of them is 0."""
    if weight == 0 or update == 0:
        return 1.0
    return min(max(weight / update, low), high)


def _names(group: dict[str, Any], params: list[torch.Tensor]) -> list[str]:
    names = dict(zip(group["params"], group["param_names"], strict=True))
    return [names[param] for param in params]
