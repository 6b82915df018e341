"""One small all-reduce per update: which parameters had a gradient anywhere, and do the ranks count alike.

Also the error for gradients that no engine has asked for.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from polyscale.errors import PolyscaleError, RankError
from polyscale.interfaces.parallelism import ParallelContext


class UsageAgreement:
    """Exchanges flags and counts between the data-parallel ranks.

    Args:
        flags: how many flags there are; the same on all ranks.
    """

    def __init__(self, context: ParallelContext, flags: int) -> None:
        self._alone = context.topology.dp_size == 1
        self._group = None if self._alone else context.topology.group("grad")
        self._communication, self._device, self._flags = context.communication, context.device, flags

    def exchange(self, flags: Sequence[bool], equal: Sequence[int], what: str) -> list[bool]:
        """Return for each flag whether any rank has set it. Collective.

        Args:
            flags: this rank's flags.
            equal: numbers that must be equal on all ranks.
            what: the numbers in words, for the error.

        Raises:
            RankError: the numbers differ.
        """
        assert len(flags) == self._flags
        if self._alone:
            return list(flags)
        # The largest of x and of -x are equal in size exactly when every rank has the same x.
        values = [*map(int, flags), *equal, *(-number for number in equal)]
        tensor = torch.tensor(values, dtype=torch.int32).to(self._device)
        self._communication.all_reduce(tensor, self._group, op="max").wait_host()
        answer = tensor.tolist()
        most, least = answer[len(flags) : len(flags) + len(equal)], answer[len(flags) + len(equal) :]
        for own, high, low in zip(equal, most, least, strict=True):
            if high != -low:
                raise RankError(
                    f"{what}: this rank has {own}, others go from {-low} to {high}",
                    why="an update would average different numbers of gradients, or sum those of different units",
                    fix="Make the same calls on every rank (forward, backward, weight=, step, flush)",
                )
        return [bool(value) for value in answer[: len(flags)]]


def outside_backward(fqn: str) -> PolyscaleError:
    """The error for a gradient that arrives while the engine which trains the parameter runs no backward."""
    return PolyscaleError(
        f"A gradient of {fqn!r} outside engine.backward() of the engine that trains it",
        why="it would be added to an accumulation that knows nothing of it (loss.backward(), or the loss of another "
        "engine's model)",
        fix="Call backward(loss) of the engine whose model computed the loss",
    )
