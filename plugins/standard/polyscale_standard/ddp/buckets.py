"""Gradients in flat buckets: added in fp32 as autograd makes them, summed over ranks while backward still runs.

Notable: a bucket is launched when all its parameters have their gradient, in a fixed order, so ranks that used
different parameters launch the same sequence; what is missing at the end of the accumulation is zero and launched by
``finish``.
A gradient that arrives for a bucket already launched (a second backward in the last micro-step, or reentrant
recompute) starts a second round for that bucket, which ranks agree on with the same small all-reduce that tells which
parameters were used anywhere. Bucket order is the reverse of registration, as backward goes (Li et al. 2020, "PyTorch
Distributed", section 3.2.3).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from polyscale._torch import hook_after_accumulation
from polyscale.interfaces.communication import Communication, Work
from polyscale.interfaces.parallelism import Holding, ParallelContext
from polyscale.parameters.inspect import as_dtensor
from polyscale.parameters.sharded_store import local_tensor
from polyscale.parameters.usage import UsageAgreement, outside_backward


class Bucket:
    """One flat buffer, the parameters that own its slices, and the reduction under way."""

    def __init__(self, members: list[tuple[str, nn.Parameter]], dtype: torch.dtype, device: torch.device) -> None:
        sizes = [local_tensor(parameter).numel() for _, parameter in members]
        self.flat = torch.zeros(sum(sizes), dtype=dtype, device=device)
        shapes = [local_tensor(parameter).shape for _, parameter in members]
        parts = torch.split(self.flat, sizes) if members else ()
        self.views = {name: part.view(shape) for (name, _), part, shape in zip(members, parts, shapes, strict=True)}
        self.missing = set(self.views)
        self.work: Work | None = None
        self.first_round: torch.Tensor | None = None
        self.launched = False
        self.late = False

    def reopen(self) -> None:
        """Set the reduced first round aside, so that late gradients can be added to an empty buffer."""
        self.settle()
        self.first_round = self.flat.clone()
        self.flat.zero_()

    def settle(self) -> None:
        """Wait for the reduction under way."""
        if self.work is not None:
            self.work.wait()
            self.work = None


class BucketedGradients:
    """The gradient synchroniser of ddp. See ``GradientSynchronizer`` for the contract."""

    def __init__(
        self,
        computed: dict[str, nn.Parameter],
        masters: dict[str, nn.Parameter],
        elements: dict[str, nn.Parameter],
        context: ParallelContext,
        bucket_bytes: int,
    ) -> None:
        self.divisor = context.predivisor
        self._note = context.note
        self._communication: Communication = context.communication
        self._group = context.topology.group("grad") if context.topology.dp_size > 1 else None
        self._alone = context.topology.dp_size == 1
        self._reduction = context.precision.reduction
        self._computed = computed
        self._masters = masters
        self._elements = elements
        trained = [name for name, parameter in computed.items() if parameter.requires_grad and parameter.numel()]
        self._buckets = _make_buckets(trained, masters, context, bucket_bytes)
        self._bucket_of = {name: bucket for bucket in self._buckets for name in bucket.views}
        self._index = {name: position for position, name in enumerate(trained)}
        self._usage = UsageAgreement(context, len(self._index) + len(self._buckets))
        self._used: set[str] = set()
        self._next = 0
        self._reducing = self._given = self._open = False
        self._handles = [hook_after_accumulation(computed[name], self._make_hook(name)) for name in trained]

    def before_backward(self, *, last: bool, hold: bool) -> None:
        """See the Protocol: communicate in the last micro-step only."""
        self._reducing = last and not hold and not self._alone
        self._open = True
        for bucket in self._buckets:
            bucket.missing = set(bucket.views)
        if self._given:  # by an early ``finish``: autograd must not add to the views
            self._take_back()

    def after_backward(self) -> None:
        """See the Protocol."""
        self._reducing = self._open = False

    @torch.no_grad()
    def finish(self, equal: Sequence[int] = ()) -> None:
        """See the Protocol."""
        used = self._used
        if not self._alone:
            for bucket in self._buckets[self._next :]:
                self._launch(bucket)
            used = self._agree(equal)
            for bucket in self._buckets:
                bucket.settle()
        for name, bucket in self._bucket_of.items():
            if name in used:
                self._give(name, bucket.views[name])
        self._given = True

    def clear(self) -> None:
        """See the Protocol."""
        for bucket in self._buckets:
            bucket.settle()
            bucket.launched = bucket.late = False
            bucket.first_round = None
        self._take_back()
        self._used = set()
        self._next = 0

    def recover(self) -> None:
        """Drop what a forward or backward that raised has left: also gradients that no hook has taken."""
        self._open = False
        for name in self._bucket_of:
            self._computed[name].grad = None
        self.clear()

    def holdings(self) -> Iterator[Holding]:
        """The buckets, and the first rounds of those that are reduced twice."""
        for bucket in self._buckets:
            for name, view in bucket.views.items():
                yield Holding("gradient buckets", name, view)
                if bucket.first_round is not None:
                    yield Holding("gradient buckets", f"first round of {name}", bucket.first_round)

    def close(self) -> None:
        """Remove the hooks and free the buffers."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._buckets = []
        self._bucket_of = {}

    def _take_back(self) -> None:
        for name in self._bucket_of:
            self._masters[name].grad = self._elements[name].grad = None
        self._given = False

    def _give(self, name: str, view: torch.Tensor) -> None:
        """Hand the reduced gradient to the element, and to the master where that is a DTensor over it."""
        element, master = self._elements[name], self._masters[name]
        element.grad = view if view.dtype == element.dtype else view.to(element.dtype)
        if master is not element:
            master.grad = as_dtensor(element.grad, master)

    def _make_hook(self, name: str) -> Any:
        bucket = self._bucket_of[name]
        view = bucket.views[name]

        @torch.no_grad()
        def hook(parameter: nn.Parameter) -> None:
            gradient = parameter.grad
            if gradient is None:
                return
            if not self._open:
                parameter.grad = None
                raise outside_backward(name)
            if bucket.launched and not bucket.late:
                bucket.reopen()
                bucket.late = True
            if name in self._used:
                view.add_(local_tensor(gradient))
            else:
                self._used.add(name)
                if bucket.late:
                    view.add_(local_tensor(gradient))
                else:
                    view.copy_(local_tensor(gradient))
            parameter.grad = None
            bucket.missing.discard(name)
            if self._reducing and not bucket.missing:
                self._launch_ready()

        return hook

    def _launch_ready(self) -> None:
        while self._next < len(self._buckets) and not self._buckets[self._next].missing:
            self._launch(self._buckets[self._next])

    def _launch(self, bucket: Bucket) -> None:
        for name, view in bucket.views.items():
            if name not in self._used:
                view.zero_()
        self._reduce(bucket)
        bucket.launched = True
        self._next += 1

    def _reduce(self, bucket: Bucket) -> None:
        self._note(f"all_reduce of bucket {self._buckets.index(bucket)}")
        if self.divisor != 1.0:
            bucket.flat.div_(self.divisor)
        if self._reduction is None or self._reduction == bucket.flat.dtype or bucket.flat.dtype == torch.float64:
            bucket.work = self._communication.all_reduce(bucket.flat, self._group)
            return
        lowered = bucket.flat.to(self._reduction)
        self._communication.all_reduce(lowered, self._group).wait()
        bucket.flat.copy_(lowered)

    def _agree(self, equal: Sequence[int]) -> set[str]:
        """Return the parameters used on any rank, after second rounds of the buckets that are late on any rank."""
        flags = [name in self._used for name in self._index] + [bucket.late for bucket in self._buckets]
        answer = self._usage.exchange(flags, equal, "micro-steps and weights of this accumulation")
        for bucket, late in zip(self._buckets, answer[len(self._index) :], strict=True):
            if late:
                self._second_round(bucket)
        return {name for name, used in zip(self._index, answer, strict=False) if used}

    def _second_round(self, bucket: Bucket) -> None:
        if not bucket.late:
            bucket.reopen()
        self._reduce(bucket)
        bucket.settle()
        assert bucket.first_round is not None
        bucket.flat.add_(bucket.first_round)
        bucket.first_round = None
        bucket.late = False


def _make_buckets(
    names: list[str], masters: dict[str, nn.Parameter], context: ParallelContext, bucket_bytes: int
) -> list[Bucket]:
    """Fill buckets in reverse order of registration; one dtype each."""
    by_dtype: dict[torch.dtype, list[str]] = {}
    for name in reversed(names):
        dtype = torch.promote_types(masters[name].dtype, context.precision.accumulation or masters[name].dtype)
        by_dtype.setdefault(dtype, []).append(name)
    buckets: list[Bucket] = []
    for dtype, members in by_dtype.items():
        chunk: list[tuple[str, nn.Parameter]] = []
        size = 0
        for name in members:
            chunk.append((name, masters[name]))
            size += local_tensor(masters[name]).numel() * dtype.itemsize
            if size >= bucket_bytes:
                buckets.append(Bucket(chunk, dtype, context.device))
                chunk, size = [], 0
        if chunk:
            buckets.append(Bucket(chunk, dtype, context.device))
    return buckets
