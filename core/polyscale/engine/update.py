"""One update: reduce, norm, one factor, overflow check, optimizer.

Gradients arrive as sums over ranks and micro-steps. One factor (averaging, loss scale, clipping) is applied to them in
one pass, in the master's dtype. The norm is one sum of squares per multiplicity (how many ranks hold an element),
divided by it and added over all ranks in fp64 where the device has it; ``grad_norm`` is that of the averaged, unscaled
gradient before clipping, whose factor is ``max_norm / (norm + 1e-6)``, at most 1, as in ``torch.nn.utils``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from polyscale.errors import PolyscaleError
from polyscale.interfaces.accelerator import Accelerator
from polyscale.interfaces.communication import Communication
from polyscale.parameters.norms import sums_of_squares
from polyscale.parameters.store import ParameterStore
from polyscale.topology import Topology

CLIP_EPSILON = 1e-6


@dataclass(frozen=True)
class GradientNumbers:
    """What one update knows about its gradients.

    Attributes:
        norm: norm of the averaged gradient before clipping (0-dim tensor on the device).
        clip_factor: what clipping multiplied by (0-dim tensor, or 1.0).
        overflow: whether it is infinite or not a number; None when that was not asked.
    """

    norm: torch.Tensor
    clip_factor: torch.Tensor | float
    overflow: bool | None


class GradientScaling:
    """Computes the norm over all ranks and applies the one factor."""

    def __init__(
        self, store: ParameterStore, topology: Topology, communication: Communication, accelerator: Accelerator
    ) -> None:
        self._store = store
        self._topology = topology
        self._communication = communication
        wide = "fp64" in accelerator.capabilities.dtypes
        self._dtype = torch.float64 if wide else torch.float32
        self._device = accelerator.device()
        self._trained = [fqn for fqn, info in store.infos.items() if info.requires_grad]

    @torch.no_grad()
    def apply(
        self,
        *,
        micro_steps: int,
        weight: float | None,
        loss_scale: float,
        predivisor: float,
        max_norm: float,
        check: bool,
    ) -> GradientNumbers:
        """Scale all gradients in place. Collective.

        Raises:
            PolyscaleError: the weights of all ranks add up to nothing.
        """
        by_multiplicity = self._gradients()
        squares, total_weight = self._totals(by_multiplicity, weight)
        if total_weight is not None:
            if float(total_weight) <= 0:
                raise PolyscaleError(
                    "The weights of this accumulation add up to 0 on all ranks", why="nothing to average"
                )
            mean: torch.Tensor | float = predivisor / (total_weight * loss_scale)
        else:
            mean = predivisor / (micro_steps * self._topology.dp_size * loss_scale)
        norm = squares.sqrt() * mean
        overflow = not bool(torch.isfinite(norm)) if check else None
        clip: torch.Tensor | float = 1.0
        if max_norm > 0:
            clip = (max_norm / (norm + CLIP_EPSILON)).clamp(max=1.0)
        if not overflow:
            self._multiply(by_multiplicity, mean * clip)
        return GradientNumbers(norm=norm, clip_factor=clip, overflow=overflow)

    def first_non_finite(self) -> str | None:
        """Name the first parameter whose gradient on this rank is infinite or not a number."""
        for fqn in self._trained:
            gradient = self._store.local(fqn, "gradient")
            if gradient is not None and not bool(torch.isfinite(gradient).all()):
                return fqn
        return None

    def _gradients(self) -> dict[int, list[torch.Tensor]]:
        found: dict[int, list[torch.Tensor]] = {}
        for fqn in self._trained:
            gradient = self._store.local(fqn, "gradient")
            if gradient is not None and gradient.numel():
                found.setdefault(self._store.infos[fqn].multiplicity, []).append(gradient)
        return found

    def _totals(
        self, by_multiplicity: dict[int, list[torch.Tensor]], weight: float | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the sum of squares over the whole model, and the sum of weights over data-parallel ranks."""
        world = self._topology.world_size
        totals = torch.zeros(2, dtype=self._dtype, device=self._device)
        for multiplicity, gradients in by_multiplicity.items():
            sums = sums_of_squares(gradients, dtype=self._dtype, device=self._device)
            totals[0] += sums.sum() / multiplicity
        if weight is not None:
            totals[1] = weight * self._topology.dp_size / world
        # Which multiplicities exist is the same on all ranks, so all skip the collective or none does.
        replicated = all(info.multiplicity == world for info in self._store.infos.values())
        if world > 1 and (weight is not None or not replicated):
            self._communication.all_reduce(totals, self._topology.group("norm")).wait()
        elif replicated:
            totals[0] *= world
        return totals[0], totals[1] if weight is not None else None

    def _multiply(self, by_multiplicity: dict[int, list[torch.Tensor]], factor: Any) -> None:
        if self._device.type == "cpu" and isinstance(factor, torch.Tensor):
            factor = factor.item()
        if isinstance(factor, float) and factor == 1.0:
            return
        for gradients in by_multiplicity.values():
            if isinstance(factor, torch.Tensor):
                factor = factor.to(gradients[0].dtype)
            torch._foreach_mul_(gradients, factor)
