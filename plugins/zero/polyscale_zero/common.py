"""Parameters that lie once in the memory of a host, for all its ranks (stages 1 and 2, ``share_host_memory``).

Notable: each rank updates the part that it owns, in place, between two barriers: one when all have done with the old
values, one when all new ones are there. Nothing else may write. In debug mode (``check_shared_memory``) checksums of
what a rank does not own are taken after each update and compared before the next one, so that a write through ``.data``
is found too; who wrote is told by autograd's version counters, which such a write alone does not touch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from polyscale.errors import ConfigError, RankError
from polyscale.parameters.sharded_store import checksum
from polyscale_zero.flat import SHARE_FIX, SHARE_OPTION, Flat, Sharding

if TYPE_CHECKING:
    from polyscale.interfaces.communication import Communication
    from polyscale_zero.options import Options


def require_common_memory(options: Options, communication: Communication, *, stage: int, device: torch.device) -> None:
    """Refuse options that cannot be followed.

    Raises:
        ConfigError: they contradict one another, the stage, the device or the communication.
    """
    if options.check_shared_memory and not options.share_host_memory:
        raise ConfigError(
            "backends.options.zero.check_shared_memory without share_host_memory",
            why="there is no shared memory to check",
            fix="Set share_host_memory as well, or leave both out",
        )
    if not options.share_host_memory:
        return
    if stage == 3:
        raise ConfigError(
            f"{SHARE_OPTION} at zero_optimization.stage 3",
            why="stage 3 holds each parameter once over all ranks already",
            fix="Leave it out, or use stage 1 or 2",
        )
    if device.type != "cpu":
        raise ConfigError(
            f"{SHARE_OPTION} on {device.type}",
            why="parameters lie in the memory of the device, which each rank has for itself",
            fix="Leave it out, or use accelerator cpu",
        )
    if not hasattr(communication, "shared"):
        raise ConfigError(
            f"{SHARE_OPTION} with communication {communication.name!r}",
            why="it makes no memory that several processes share; shm does",
            fix=SHARE_FIX,
        )


class CommonMemory:
    """Orders the ranks around updates of common memory, and finds writes that are not of its owner.

    Args:
        flats: the buffers that are common.
        check: whether to look for foreign writes.
    """

    def __init__(self, flats: Sequence[Flat], sharding: Sharding, *, check: bool) -> None:
        self._sharding, self._check = sharding, check
        self._flats = {fqn: flat for flat in flats for fqn in flat.parameters}
        self._sums: dict[str, bytes] = {}
        self._versions: dict[str, int] = {}
        self._look(self._flats)

    @property
    def is_used(self) -> bool:
        """Whether there is any."""
        return bool(self._flats)

    def before_update(self) -> None:
        """Wait until no rank computes with the old values any more. Collective.

        Raises:
            RankError: somebody has written who may not (debug mode).
        """
        if self._check:
            self._compare()
        self._barrier()

    def after_update(self, names: Iterable[str] | None = None) -> None:
        """Wait until all ranks have written what they own of ``names`` (None: all). Collective."""
        self._barrier()
        self._look(self._flats if names is None else [name for name in names if name in self._flats])

    def _barrier(self) -> None:
        self._sharding.communication.barrier(self._sharding.reduce).wait_host()

    def _look(self, names: Iterable[str]) -> None:
        if self._check:
            for fqn in names:
                self._sums[fqn] = self._sum(fqn)
                self._versions[fqn] = self._flats[fqn].parameters[fqn]._version

    def _sum(self, fqn: str) -> bytes:
        """A digest of what this rank does not own of a parameter."""
        flat, sums = self._flats[fqn], b""
        whole = flat.view(flat.whole, fqn).reshape(-1)
        for rank in range(self._sharding.world):
            span = flat.span(fqn, rank)
            if rank != self._sharding.rank and span.numel:
                sums += checksum(whole[span.first : span.first + span.numel])
        return sums

    def _compare(self) -> None:
        names = list(self._flats)
        sharding = self._sharding
        found = [
            (self._sum(fqn) != self._sums[fqn]) + 2 * (self._flats[fqn].parameters[fqn]._version != self._versions[fqn])
            for fqn in names
        ]
        own = torch.tensor(found, dtype=torch.int32)
        everyone = own.new_empty(sharding.world * len(names))
        sharding.communication.all_gather(everyone, own, sharding.gather).wait_host()
        by_rank = everyone.view(sharding.world, len(names))
        changed = [place for place in range(len(names)) if bool((by_rank[:, place] & 1).any())]
        if not changed:
            return
        touched = (by_rank[:, changed] & 2).any(dim=1)
        assert sharding.gather is not None
        writers = [dist.get_global_rank(sharding.gather, rank) for rank in touched.nonzero().flatten().tolist()]
        told = f"rank {' and rank '.join(map(str, writers))} wrote" if writers else "a write through .data hides who"
        raise RankError(
            f"Parameters in shared memory were written outside an update: {', '.join(names[i] for i in changed)}",
            why=f"they are the parameters of all ranks of this host, each part has one owner, and {told}",
            fix="Write with engine.parameters_store.gathered([name], modify=True) or set_full(name, value) on all "
            "ranks; load a checkpoint to have the right values again",
        )
