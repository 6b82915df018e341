"""Device memory as gloo's threads see it, at once or late.

Notable: normally gloo works on the memory of the device's tensors itself. Where work is late
(``polyscale_sim.faults.late``), it works on copies that were taken when the collective was called. The destination then
holds NaN (integers: all bits set) until whoever reads it is ordered behind the communication stream, and an input that
was overwritten before its collective was waited for is an error.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch

from polyscale_sim import device

Tensors = Sequence[torch.Tensor]


class Direct:
    """Views of the device's own memory."""

    def __init__(self, inputs: Tensors, outputs: Tensors) -> None:
        self.inputs = [device.cpu_view(tensor.detach()) for tensor in inputs]
        self.outputs = [device.cpu_view(tensor.detach()) for tensor in outputs]

    def publish(self) -> None:
        """Results are where they belong."""

    def arrive(self) -> None:
        """Nothing to order: they are there."""

    def stream(self) -> contextlib.AbstractContextManager[object]:
        """Nothing to order."""
        return contextlib.nullcontext()


class Late:
    """Copies; results are written as late work of the communication stream.

    Attributes:
        inputs: copies of what is read.
        outputs: host tensors for what is written.
    """

    def __init__(
        self, inputs: Tensors, outputs: Tensors, stream: torch.Stream, *, in_place: bool = False, behind: bool = False
    ) -> None:
        """``in_place``: outputs are read first; ``behind``: read behind the work of ``stream``, not the current one."""
        self._stream = stream
        self._event = torch.Event(device=stream.device)
        self._targets = [tensor.detach() for tensor in outputs]
        with _ordered(stream) if behind else contextlib.nullcontext():
            sources = [device.cpu_view(tensor.detach()) for tensor in inputs]
            targets = [device.cpu_view(target) for target in self._targets]
        self.inputs = [source.clone() for source in sources]
        self.outputs = [target.clone() if in_place else torch.empty_like(target) for target in targets]
        self.arrived = False
        spoiled = {_memory(target) for target in targets}
        self._watched = [
            (tensor.detach(), _memory(source), source.clone())
            for tensor, source in zip(inputs, sources, strict=True)
            if _memory(source) not in spoiled
        ]
        for target in targets:
            poison(target)

    def publish(self) -> None:
        """Queue the results on the communication stream; nothing else sees them before it is ordered behind it."""
        for target, result in zip(self._targets, self.outputs, strict=True):
            if target.untyped_storage().nbytes():
                device.late_write(target, result, self._stream)
        self._event.record(self._stream)

    def arrive(self) -> None:
        """Order the current stream behind the results.

        Raises:
            RuntimeError: an input was overwritten in the meantime.
        """
        watched, self._watched = self._watched, []
        for tensor, memory, copy in watched:
            view = device.cpu_view(tensor) if tensor.untyped_storage().nbytes() else copy
            if _memory(view) == memory and not _same_bytes(view, copy):
                raise RuntimeError(
                    f"an input of {copy.numel()} elements was overwritten before its collective was waited for"
                )
        self._event.wait(torch.accelerator.current_stream(self._stream.device))
        self.arrived = True

    def stream(self) -> contextlib.AbstractContextManager[object]:
        """Make the communication stream the current one of this thread."""
        return self._stream

    def writes_to(self, tensors: Tensors) -> bool:
        """Whether a result goes to the memory of one of ``tensors``."""
        memory = {_memory(target) for target in self._targets}
        return any(_memory(tensor) in memory for tensor in tensors)


@contextlib.contextmanager
def _ordered(stream: torch.Stream) -> Iterator[None]:
    """Make ``stream`` the current one, ordered behind the one that was."""
    stream.wait_stream(torch.accelerator.current_stream(stream.device))
    with stream:
        yield


def poison(view: torch.Tensor) -> None:
    """Set all bits of a contiguous host tensor, which is NaN in every floating-point dtype that has one."""
    if view.dtype == torch.bool:
        view.fill_(True)
    elif view.numel():
        view.reshape(-1).view(torch.uint8).fill_(255)


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _same_bytes(one: torch.Tensor, two: torch.Tensor) -> bool:
    return torch.equal(one.reshape(-1).view(torch.uint8), two.reshape(-1).view(torch.uint8))
