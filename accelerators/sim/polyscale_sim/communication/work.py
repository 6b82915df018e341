"""Works: what a caller waits for.

Notable: ``wait`` orders the current stream behind the collective and thereby makes its results visible there. Where
collectives are late (``polyscale_sim.faults.late``), the results lie aside until then and the destination holds NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch

from polyscale_sim.communication.memory import Direct, Late
from polyscale_sim.communication.queue import Job
from polyscale_standard.communication._torch import Work


class SimWork(Work):  # type: ignore[misc]
    """A collective in the queue of its group."""

    def __init__(
        self, job: Job, results: Sequence[torch.Tensor], memory: Direct | Late, keep: Any = None, *, source: Any = None
    ) -> None:
        """``results``: what it writes, into ``memory``; ``keep``: held alive; ``source``: of a receive."""
        super().__init__()
        self._job = job
        self._results = list(results)
        self._memory = memory
        self._keep = keep
        self._source = source
        self._future: Any = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Order the current stream behind the collective; the host waits too, because it is what computes.

        Raises:
            RuntimeError: it failed, or did not finish in time.
        """
        self._job.wait(timeout)
        self._memory.arrive()
        self._keep = None
        return True

    def synchronize(self) -> None:
        """Order the current stream behind the collective."""
        self.wait()

    def block_current_stream(self) -> None:
        """Order the current stream behind the collective."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether it has run, well or not."""
        return self._job.done

    def is_success(self) -> bool:
        """Whether it has run well."""
        return self._job.done and self._job.error is None

    def exception(self) -> BaseException | None:
        """What it raised, or None."""
        return self._job.error

    def result(self) -> list[torch.Tensor]:
        """The tensors that it writes."""
        return list(self._results)

    def source_rank(self) -> int:
        """Rank in the group that sent a received tensor (after ``wait``); -1 for collectives."""
        return -1 if self._source is None else self._source.source

    _source_rank = source_rank

    def get_future(self) -> Any:
        """A future of the list of tensors it writes; its ``wait`` orders the current stream, as this one's does."""
        if self._future is None:
            devices: Any = sorted({tensor.device for tensor in self._results}, key=str)
            self._future = torch.futures.Future(devices=devices)
            self._job.when_done(self._settle)
        return self._future

    def _settle(self) -> None:
        if self._job.error is not None:
            self._future.set_exception(self._job.error)
            return
        with self._memory.stream():  # the future records the stream that its value is ready on
            self._future.set_result(self._results)


class PairWork(Work):  # type: ignore[misc]
    """A send, which gloo carries out itself and in no order with collectives."""

    def __init__(self, inner: Any, tensor: torch.Tensor, memory: Direct | Late) -> None:
        """``inner``: gloo's work; ``tensor``: what is sent, from ``memory``."""
        super().__init__()
        self._inner = inner
        self._tensor = tensor
        self._memory: Direct | Late | None = memory

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Order the current stream behind the transfer.

        Raises:
            RuntimeError: it failed, or did not finish in time.
        """
        if self._memory is not None:
            self._inner.wait(timeout) if timeout else self._inner.wait()
            self._memory.publish()
            self._memory.arrive()
            self._memory = None
        return True

    def is_completed(self) -> bool:
        """Whether it has been waited for."""
        return self._memory is None

    def is_success(self) -> bool:
        """Whether it has been waited for, and went well."""
        return self._memory is None

    def result(self) -> list[torch.Tensor]:
        """The tensor."""
        return [self._tensor]


class ManyWorks(Work):  # type: ignore[misc]
    """Works that are waited for together."""

    def __init__(self, works: Sequence[Any]) -> None:
        super().__init__()
        self._works = list(works)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for each."""
        for work in self._works:
            work.wait(timeout) if timeout else work.wait()
        return True

    def is_completed(self) -> bool:
        """Whether all are."""
        return all(work.is_completed() for work in self._works)
