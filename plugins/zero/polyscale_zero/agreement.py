"""Whether all ranks are at the same unit before they gather it.

Notable: blocks of a model are of equal size, so the collectives of ranks that run different blocks would pair up, and
the weights of one block silently become those of another. One number of each rank is exchanged first, by the hosts. On
devices, which run behind the host, the answer of a visit that was foreseen is looked at in the next one: what is
gathered for both has been launched by then, in the same order on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from polyscale.errors import RankError
from polyscale_zero.flat import Sharding

PHASES = ("forward", "backward", "the end of backward")


class VisitAgreement:
    """Compares where the ranks are.

    Args:
        labels: names of the units by number.
    """

    def __init__(self, sharding: Sharding, labels: Sequence[str]) -> None:
        self._sharding, self._labels = sharding, labels
        self._on_host = sharding.device.type == "cpu"
        self._asked: list[tuple[Callable[[], object], torch.Tensor]] = []

    def compare(self, unit: int, phase: str, *, at_once: bool = True) -> None:
        """Say that this rank is about to run ``unit``, and look at what the others have said. Collective.

        Args:
            unit: its number.
            phase: one of ``PHASES``.
            at_once: wait for the answer, rather than at the next call.

        Raises:
            RankError: another rank is, or was at the last call, somewhere else.
        """
        if self._sharding.world == 1:
            return
        self.settle()
        own = torch.tensor([unit * len(PHASES) + PHASES.index(phase)], dtype=torch.int32)
        everyone = own.new_empty(self._sharding.world)
        wait: Callable[[], object]
        if self._on_host:
            wait = self._sharding.communication.all_gather(everyone, own, self._sharding.gather).wait_host
        else:  # groups of a device have a backend for tensors of the host
            parts = [everyone[rank : rank + 1] for rank in range(self._sharding.world)]
            wait = dist.all_gather(parts, own, group=self._sharding.gather, async_op=True).wait
        self._asked.append((wait, everyone))
        if at_once or self._on_host:
            self.settle()

    def settle(self) -> None:
        """Look at the answers that have not been looked at.

        Raises:
            RankError: ranks were at different units.
        """
        asked, self._asked = self._asked, []
        for wait, everyone in asked:
            wait()
            codes = everyone.tolist()
            other = next((rank for rank, code in enumerate(codes) if code != codes[0]), None)
            if other is not None:
                group = self._sharding.gather
                assert group is not None  # more than one rank has answered
                first, second = (dist.get_global_rank(group, rank) for rank in (0, other))
                raise RankError(
                    f"Ranks run different units: rank {first} asks for the all_gather of {self._text(codes[0])}, "
                    f"rank {second} for that of {self._text(codes[other])}",
                    why="under stage 3 a unit's parameters are gathered from all ranks when it runs, so all ranks must "
                    "run the same units in the same order",
                    fix="Take the same branches on every rank, or use zero_optimization.stage 2",
                )

    def forget(self) -> None:
        """Drop what was asked: an exception has ended the pass."""
        self._asked = []

    def _text(self, code: int) -> str:
        unit, phase = divmod(code, len(PHASES))
        if PHASES[phase] == PHASES[-1]:
            return f"nothing ({PHASES[-1]})"
        return f"{self._labels[unit]!r} in {PHASES[phase]}"
