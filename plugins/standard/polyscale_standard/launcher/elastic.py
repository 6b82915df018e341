"""One host's ranks under torchrun's elastic agent: rendezvous on loopback, no restarts, output to our pipes.

Notable: the agent runs in a thread of its own, so that it installs no signal handlers and no exception lands in the
middle of torch's code; signals are the caller's. The rendezvous store lives in this process, so ranks can still reach
it when rank 0 is the one that died.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from polyscale_standard.launcher.environment import LOOPBACK
from polyscale_standard.launcher.processes import Ended
from polyscale_standard.launcher.streams import RankStreams

logger = logging.getLogger("polyscale")
_POLL_S = 0.1


class AgentThread:
    """The elastic agent at work.

    Args:
        command: program and arguments, the same for every rank.
        nproc: number of ranks.
        env: variables added for every rank.
        streams: where ranks write.
        on_start: given local rank -> process id, once ranks run.
        hold: while it returns true, the agent ends no rank.
        cancelled: asked right before ranks start; true means that they must not.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        nproc: int,
        env: Mapping[str, str],
        streams: RankStreams,
        on_start: Callable[[dict[int, int]], None],
        hold: Callable[[], bool],
        cancelled: Callable[[], bool],
    ) -> None:
        from polyscale import _torch

        self._error: BaseException | None = None
        self._result: Any = None
        self._spec = _worker_spec(command, nproc)
        logs = _logs_specs(streams, env, cancelled)
        self._agent = _torch.elastic_agent(self._spec, logs, on_start=on_start, hold=hold)
        self._thread = threading.Thread(target=self._run, name="elastic-agent", daemon=True)

    def start(self) -> None:
        """Start rendezvous and ranks."""
        self._thread.start()

    def wait(self, seconds: float) -> bool:
        """Wait for the end; returns whether it came within ``seconds``."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def failure(self) -> Ended | None:
        """The rank that the agent saw fail first; None when all ended well. Raises what the agent itself raised."""
        if self._error is not None and not isinstance(self._error, _Cancelled):
            raise self._error
        failures = getattr(self._result, "failures", None)
        if not failures:
            return None
        first = min(failures.values(), key=lambda failure: failure.timestamp)
        return Ended(first.local_rank, first.exitcode)

    def _run(self) -> None:
        try:
            with quiet_elastic():
                self._result = self._agent.run()
        except BaseException as error:  # handed over by failure(), in the caller's thread
            self._error = error
        finally:
            with contextlib.suppress(Exception):
                self._spec.rdzv_handler.shutdown()


class _Cancelled(Exception):
    """The launch was given up before ranks started."""


def _worker_spec(command: Sequence[str], nproc: int) -> Any:
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.rendezvous import RendezvousParameters, registry

    parameters = RendezvousParameters(
        backend="c10d",
        endpoint=f"{LOOPBACK}:0",
        run_id=uuid.uuid4().hex,
        min_nodes=1,
        max_nodes=1,
        local_addr=LOOPBACK,
        is_host=True,
    )
    # The agent fills in templates ("${local_rank}"): a doubled dollar sign is a dollar sign.
    program, *args = (word.replace("$", "$$") for word in command)
    return WorkerSpec(
        role="rank",
        local_world_size=nproc,
        entrypoint=program.replace("$$", "$"),
        args=tuple(args),
        rdzv_handler=registry.get_rendezvous_handler(parameters),
        max_restarts=0,
        monitor_interval=_POLL_S,
        local_addr=LOOPBACK,
    )


def _logs_specs(streams: RankStreams, env: Mapping[str, str], cancelled: Callable[[], bool]) -> Any:
    from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs

    class Pipes(LogsSpecs):
        """Sends what ranks write to our pipes. Called right before ranks start, with their environments."""

        def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
            if cancelled():
                raise _Cancelled
            paths = {rank: streams.paths(rank) for rank in envs}
            for variables in envs.values():
                variables.update(env)
                variables["TORCHELASTIC_ERROR_FILE"] = ""
            return LogsDest(
                stdouts={rank: stdout for rank, (stdout, _) in paths.items()},
                stderrs={rank: stderr for rank, (_, stderr) in paths.items()},
                error_files=dict.fromkeys(envs, ""),
            )

        @property
        def root_log_dir(self) -> str:
            return ""

    return Pipes()


@contextlib.contextmanager
def quiet_elastic() -> Iterator[None]:
    """Silence the agent's loggers: what matters is said once, by us. They speak where polyscale logs at DEBUG."""
    if logger.isEnabledFor(logging.DEBUG):
        yield
        return
    prefix = "torch.distributed.elastic"
    names = [name for name in logging.root.manager.loggerDict if name.startswith(prefix)]
    before = {name: logging.getLogger(name).level for name in names}
    for name in names:
        logging.getLogger(name).setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        for name, level in before.items():
            logging.getLogger(name).setLevel(level)
