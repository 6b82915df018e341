"""Order: which sample stands at which global position.

Notable: one permutation per (seed, epoch), the same on every rank; a round is the next ``micro_batch * ranks``
positions, of which rank r takes the r-th part. So the sequence of samples is a property of the seed alone, and a run
that goes on with other sizes goes on at the same position. Pure arithmetic: no dataset, no communication.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class Order:
    """The samples of each round.

    Attributes:
        length: number of samples.
        seed: of the permutations.
        shuffle: False keeps the dataset's order.
        micro_batch: samples of one rank in one round.
        ranks: data-parallel ranks.
        drop_last: True leaves out what does not fill a round at the end of an epoch; False fills the last round up
            from the beginning of the same epoch's order.
    """

    length: int
    seed: int
    shuffle: bool
    micro_batch: int
    ranks: int
    drop_last: bool

    @property
    def round_size(self) -> int:
        """Samples that all ranks take together."""
        return self.micro_batch * self.ranks

    def rounds(self, position: int = 0) -> int:
        """Rounds from ``position`` to the end of the epoch."""
        left = max(self.length - position, 0)
        return left // self.round_size if self.drop_last else -(-left // self.round_size)

    def advance(self, position: int) -> int:
        """Position after one round; at most ``length``: samples that fill up the last round do not count."""
        return min(position + self.round_size, self.length)

    def batches(self, *, epoch: int, position: int, rank: int) -> Iterator[list[int]]:
        """Yield the sample indices of each of this rank's batches from ``position`` to the end of the epoch."""
        order = self._permutation(epoch)
        for start in range(position, position + self.rounds(position) * self.round_size, self.round_size):
            first = start + rank * self.micro_batch
            places = [place % self.length for place in range(first, first + self.micro_batch)]
            yield places if order is None else order[places].tolist()

    def _permutation(self, epoch: int) -> torch.Tensor | None:
        if not self.shuffle:
            return None
        generator = torch.Generator().manual_seed(stable_hash(self.seed, "order", epoch))
        return torch.randperm(self.length, generator=generator, device="cpu")


def stable_hash(*parts: object) -> int:
    """A number below 2^63 that depends on ``parts`` alone, in every process."""
    text = "\0".join(map(str, parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
