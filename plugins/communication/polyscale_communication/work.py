"""Works: what a caller waits for.

Notable: who waits carries the collective out, where nobody does yet; ``wait`` with a time-out only waits. Tensors are
held by the work, and by its group until the collective has ended, whoever drops the work.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

from polyscale_standard.communication._torch import Work

if TYPE_CHECKING:
    from polyscale_communication.settler import Settler


class EndedWork(Work):  # type: ignore[misc]
    """A collective that has been carried out."""

    def __init__(self, results: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._results = list(results)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return at once."""
        return True

    def synchronize(self) -> None:
        """Return at once."""

    def block_current_stream(self) -> None:
        """Return at once."""

    def is_completed(self) -> bool:
        """It is."""
        return True

    def is_success(self) -> bool:
        """It was."""
        return True

    def exception(self) -> BaseException | None:
        """None."""
        return None

    def result(self) -> list[torch.Tensor]:
        """The tensors that it has written."""
        return self._results

    def get_future(self) -> Any:
        """A future that has its value."""
        future: Any = torch.futures.Future()
        future.set_result(self._results)
        return future


class ShmWork(Work):  # type: ignore[misc]
    """A collective, or a message, in the hands of the transport."""

    def __init__(self, transport: Any, job: Any, results: Sequence[torch.Tensor], keep: Any, settler: Settler) -> None:
        """``results``: what it writes; ``keep``: held alive."""
        super().__init__()
        self._transport = transport
        self._job = job
        self._results = list(results)
        self._keep = keep
        self._settler = settler
        self._future: Any = None

    def _wait(self, seconds: float) -> None:
        self._transport.wait(self._job, seconds)

    def _error(self) -> str:
        return str(self._transport.error_of(self._job))

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until it has ended.

        Raises:
            RuntimeError: it failed, or did not end in time.
        """
        self._wait(timeout.total_seconds() if timeout else -1.0)
        self._keep = None
        return True

    def synchronize(self) -> None:
        """Block until it has ended."""
        self.wait()

    def block_current_stream(self) -> None:
        """Block until it has ended."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether it has ended, well or not."""
        return bool(self._transport.is_done(self._job))

    def is_success(self) -> bool:
        """Whether it has ended well."""
        return self.is_completed() and not self._error()

    def exception(self) -> BaseException | None:
        """What it raised, or None."""
        error = self._error()
        return RuntimeError(error) if error else None

    def result(self) -> list[torch.Tensor]:
        """The tensors that it writes."""
        return self._results

    def get_future(self) -> Any:
        """A future of the tensors that it writes; it is settled from a thread where it has not ended yet."""
        if self._future is None:
            self._future = torch.futures.Future()
            if self.is_completed():
                self.settle()
            else:
                self._settler.add(self)
        return self._future

    def linger(self, seconds: float) -> None:
        """Block until it has ended, or for ``seconds``."""
        with contextlib.suppress(RuntimeError):
            self._wait(seconds)

    def settle(self) -> None:
        """Give the future the value or the error of what has ended."""
        try:
            self._wait(-1.0)
        except Exception as error:
            with contextlib.suppress(RuntimeError):
                self._future.set_exception(RuntimeError(str(error)))
            return
        self._future.set_result(self._results)


class MessageWork(ShmWork):
    """A send or a receive."""

    def _wait(self, seconds: float) -> None:
        self._transport.wait_message(self._job, seconds)

    def _error(self) -> str:
        return str(self._transport.error_of_message(self._job))

    def is_completed(self) -> bool:
        """Whether it has ended, well or not."""
        return bool(self._transport.is_message_done(self._job))

    def source_rank(self) -> int:
        """Rank in the group that sent it (after ``wait``)."""
        return int(self._job.peer)

    _source_rank = source_rank


class ManyWorks(Work):  # type: ignore[misc]
    """Works that are waited for together."""

    def __init__(self, works: Sequence[Any], results: Sequence[torch.Tensor] = ()) -> None:
        super().__init__()
        self._works = list(works)
        self._results = list(results)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for each."""
        for work in self._works:
            work.wait(timeout) if timeout else work.wait()
        return True

    def synchronize(self) -> None:
        """Wait for each."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether all are."""
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        """Whether all went well."""
        return all(work.is_success() for work in self._works)

    def exception(self) -> BaseException | None:
        """The first error, or None."""
        return next(filter(None, (work.exception() for work in self._works)), None)

    def result(self) -> list[torch.Tensor]:
        """The tensors that they write."""
        return self._results

    def get_future(self) -> Any:
        """A future of the tensors that they write."""
        whole: Any = torch.futures.Future()
        parts = torch.futures.collect_all([work.get_future() for work in self._works])

        def settle(done: Any) -> None:
            try:
                for part in done.value():
                    part.value()
            except Exception as error:
                whole.set_exception(RuntimeError(str(error)))
                return
            whole.set_result(self._results)

        parts.add_done_callback(settle)
        return whole
