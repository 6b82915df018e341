"""The gradients of one flat buffer: added as autograd makes them, reduced to the sums of this rank's shard.

Notable: autograd's gradient is copied into the flat buffer and dropped, which is cheaper than to add it to zeros, and
the reduction reads the buffer where it is. Stage 1 keeps the buffer and reduces it in place; stages 2 and 3 take one
for as long as a unit's backward and reduction last.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from polyscale_zero.flat import Flat

if TYPE_CHECKING:
    from polyscale.interfaces.communication import Work


@dataclass(frozen=True)
class ReductionRule:
    """How gradients are added and reduced.

    Attributes:
        accumulation: dtype in which they are added; None: the master's.
        reduction: dtype in which they travel; None: that of ``accumulation``.
        divisor: what they are divided by before.
        keep: whether the whole buffer stays (stage 1).
    """

    accumulation: torch.dtype | None
    reduction: torch.dtype | None
    divisor: float
    keep: bool


@dataclass
class _Sent:
    """A reduction under way: what it reads (``lowered``: in the dtype that is sent), and what it writes."""

    work: Work | None
    source: torch.Tensor
    lowered: torch.Tensor | None
    output: torch.Tensor


class FlatGradient:
    """See the module.

    Attributes:
        filled: parameters with a gradient that was not reduced yet.
    """

    def __init__(self, flat: Flat, rule: ReductionRule) -> None:
        self.flat = flat
        self.filled: set[str] = set()
        self._rule = rule
        self._dtype = torch.promote_types(flat.kind.master, rule.accumulation or flat.kind.master)
        self._alone = flat.sharding.world == 1 and flat.sharding.replicate is None
        self._keep = rule.keep or flat.sharding.world == 1
        self._full: torch.Tensor | None = None
        self._views: dict[str, torch.Tensor] = {}
        self._shard: torch.Tensor | None = None
        self._reduced = False  # whether the shard holds sums of this accumulation
        self._earlier: torch.Tensor | None = None  # sums reduced before, where the buffer is reduced in place
        self._sent: _Sent | None = None

    @property
    def needs_memory(self) -> bool:
        """Whether the next gradient makes a new whole buffer."""
        return self._full is None

    @property
    def in_flight(self) -> bool:
        """Whether a reduction is under way."""
        return self._sent is not None

    def add(self, fqn: str, gradient: torch.Tensor) -> None:
        """Add a gradient of the parameter's local shape, in any dtype."""
        self._open()
        view = self._views[fqn]
        if gradient.layout != torch.strided and fqn not in self.filled:
            view.zero_()
            self.filled.add(fqn)
        if fqn in self.filled:
            view.add_(gradient)
        else:
            view.copy_(gradient)
            self.filled.add(fqn)

    def launch(self) -> None:
        """Begin to reduce what was added; zeros where nothing was. Collective."""
        self._open()
        assert self._full is not None
        for fqn, view in self._views.items():
            if fqn not in self.filled:
                view.zero_()
        if self._alone:  # nothing is sent: the buffer goes on being added to
            self.filled.update(self._views)
            return
        self.filled.clear()
        full = self._full
        if self._rule.divisor != 1.0:
            full.div_(self._rule.divisor)
        self._sent = self._send(full)
        if not self._keep:
            self._full, self._views = None, {}

    def settle(self) -> None:
        """Wait for the reduction under way, and add its result to the shard."""
        sent, self._sent = self._sent, None
        if sent is None:
            return
        if sent.work is not None:
            sent.work.wait()
        sharding = self.flat.sharding
        if sharding.replicate is not None:
            reduced = sent.output if sent.lowered is None else self._own(sent.lowered)
            sharding.communication.all_reduce(reduced, sharding.replicate).wait()
        if sent.lowered is not None:
            sent.output.copy_(self._own(sent.lowered))
        if self._keep:
            if self._earlier is not None:
                sent.output.add_(self._earlier)
                self._earlier = None
        elif self._reduced:
            assert self._shard is not None
            self._shard.add_(sent.output)
        self._reduced = True

    def part(self, fqn: str) -> torch.Tensor:
        """The reduced gradient of this rank's part of a parameter, in the master's dtype."""
        shard = self._own(self._full) if self._keep and self._full is not None else self._shard
        assert shard is not None
        part = self.flat.part(shard, fqn)
        return part if part.dtype == self.flat.kind.master else part.to(self.flat.kind.master)

    def clear(self) -> None:
        """Forget what was added and reduced; memory that stays between updates is kept.

        On a device the shards' gradients are freed, so that they do not add to the activations of the next forward;
        its allocator keeps the blocks. On the CPU they would be given back to the system, and cost page faults.
        """
        self.filled.clear()
        self._reduced = False
        self._earlier = None
        if not self._keep:
            self._full, self._views = None, {}
        if self.flat.sharding.device.type != "cpu":
            self._shard = None

    def forget(self) -> None:
        """Let go of everything, also of a reduction that may never end."""
        self._sent = None
        self.clear()
        self._full, self._views = None, {}

    def memory(self) -> list[torch.Tensor]:
        """What it holds beside the gradients of the shard."""
        found = [self._full] if self._full is not None else []
        if self._sent is not None:
            found += [tensor for tensor in (self._sent.source, self._sent.lowered) if tensor is not None]
        return found

    def _open(self) -> None:
        """Have a buffer that gradients can be added to."""
        if self._keep and (self._reduced or self._sent is not None) and not self._alone:
            self.settle()
            assert self._full is not None
            self._earlier = self._own(self._full).clone()
            self._reduced = False
        if self._full is None:
            self._full = self.flat.sharding.allocate(self.flat.numel, self._dtype)
            self._views = dict(self.flat.views(self._full))

    def _send(self, full: torch.Tensor) -> _Sent:
        sharding, own = self.flat.sharding, self._own(full)
        if self._keep or self._reduced or self._sent is not None:
            output = own
        else:
            if self._shard is None:
                self._shard = torch.empty_like(own)
            output = self._shard
        lower = self._rule.reduction
        lowered = None
        if lower is not None and lower != full.dtype and full.dtype != torch.float64:
            lowered = sharding.allocate(full.numel(), lower)
            lowered.copy_(full)
        work = None
        if sharding.world > 1:
            source = full if lowered is None else lowered
            target = output if lowered is None else self._own(lowered)
            work = sharding.communication.reduce_scatter(target, source, sharding.reduce)
        return _Sent(work, full, lowered, output)

    def _own(self, buffer: torch.Tensor) -> torch.Tensor:
        size, rank = self.flat.layout.shard, self.flat.sharding.rank
        return buffer[rank * size : (rank + 1) * size]
