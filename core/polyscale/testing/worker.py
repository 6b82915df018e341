"""One rank of a pool: waits for a case, runs it in a fresh default process group, answers, cleans up.

Notable: a thread reads the connection, so that the rank ends within an instant of its parent even in the middle of a
case. Answer and clean-up are two steps: no rank leaves its group before all have answered, so none sees a peer go.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import pickle
import queue
import random
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

from polyscale.testing import shipping
from polyscale.testing.failures import PackedError, RemoteError

ORPHAN_CHECK_S = 5.0
ALLOWED_WARNINGS = (
    # torch's own, about its own internals; nothing that a user of torch could act upon
    r".*torch\.distributed\.(reduce_op|_all_gather_base|_reduce_scatter_base).*deprecated.*",
    r".*`torch\.jit\..*is (deprecated|not supported).*",
    r"An output with one or more elements was resized.*",
)


def main(fd: int, settings: dict[str, Any]) -> None:
    """Serve cases on the connection ``fd`` until it closes."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    os.environ.update(settings["env"])
    sys.path.extend(entry for entry in settings["path"] if entry not in sys.path)
    import torch

    torch.set_num_threads(1)
    connection = Connection(fd)
    requests: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(connection, requests), daemon=True).start()
    rank = _Rank(connection, settings)
    while True:
        request = requests.get()
        getattr(rank, request[0])(*request[1:])


def _read(connection: Connection, requests: queue.SimpleQueue[tuple[Any, ...]]) -> None:
    parent = os.getppid()
    with contextlib.suppress(EOFError, OSError):
        while os.getppid() == parent:
            if connection.poll(ORPHAN_CHECK_S):
                requests.put(pickle.loads(connection.recv_bytes()))
    os.killpg(0, signal.SIGKILL)


class _Rank:
    """The requests that a rank answers, one method each."""

    def __init__(self, connection: Connection, settings: dict[str, Any]) -> None:
        self.connection = connection
        self.rank: int = settings["rank"]
        self.world: int = settings["world"]
        self.backend: str = settings["backend"]
        self.accelerator: str = settings["accelerator"]
        self.group_timeout = timedelta(seconds=settings["group_timeout"])
        self.device: Any = None
        self.server: Any = None
        self.port = 0

    def listen(self) -> None:
        """Start the store that all ranks of this pool meet in; answer its port."""
        import torch.distributed as dist

        self.server = dist.TCPStore(  # type: ignore[attr-defined]
            "127.0.0.1", 0, None, True, self.group_timeout, wait_for_workers=False
        )
        self._answer("port", self.server.port)

    def connect(self, port: int) -> None:
        """Learn the port of the store."""
        self.port = port

    def activate(self) -> None:
        """Activate the accelerator, once; answer ("activated",)."""
        from polyscale.discovery import load, select

        try:
            accelerator = load("accelerator", self.accelerator)
            accelerator.activate()
            self.device = accelerator
            if not self.backend:
                communication = select("communication", default=list(accelerator.communications))
                self.backend = str(communication.backend(accelerator.device_type))
            self._answer("activated")
        except BaseException as error:
            self._answer("error", traceback.format_exc(), _portable(error))

    def case(self, number: int, env: dict[str, str], seed: int, payload: bytes) -> None:
        """Run one case and answer ("result", value) or ("error", traceback, exception)."""
        with _environment(env):
            try:
                self._answer("result", self._run(number, seed, payload))
            except BaseException as error:
                self._answer("error", traceback.format_exc(), _portable(error))

    def clean(self) -> None:
        """Close what the case left open; answer ("clean", traceback or None)."""
        problem = None
        try:
            _close_engines()
            _destroy_group()
        except BaseException:
            problem = traceback.format_exc()
        gc.collect()
        self._answer("clean", problem)

    def _run(self, number: int, seed: int, payload: bytes) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for pattern in ALLOWED_WARNINGS:
                warnings.filterwarnings("ignore", pattern)
            if self.device is not None:
                self.device.set_device(self.rank % max(self.device.device_count(), 1))
            self._make_group(number)
            seed_everything(seed)
            function, args, kwargs = shipping.loads(payload)
            return function(*args, **kwargs)

    def _make_group(self, number: int) -> None:
        import torch.distributed as dist

        store = dist.TCPStore("127.0.0.1", self.port, None, False, self.group_timeout)  # type: ignore[attr-defined]
        dist.init_process_group(
            _backend(self.backend or "gloo"),
            store=dist.PrefixStore(f"case{number}", store),  # type: ignore[attr-defined]
            rank=self.rank,
            world_size=self.world,
            timeout=self.group_timeout,
        )

    def _answer(self, *message: Any) -> None:
        try:
            data = shipping.dumps(message)
        except Exception:
            data = shipping.dumps(("error", f"the result cannot be sent:\n{traceback.format_exc()}", None))
        sys.stdout.flush()
        sys.stderr.flush()
        self.connection.send_bytes(data)


def _backend(name: str) -> str:
    """The backend that torch knows as ``name``, or that the communication plugin of that name registers."""
    from torch.distributed import Backend

    from polyscale.discovery import load

    known = ":" in name or name in Backend.backend_list
    return name if known else str(load("communication", name).backend("cpu"))


def seed_everything(seed: int) -> None:
    """Seed Python's, numpy's and torch's generators."""
    import numpy
    import torch

    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)


@contextlib.contextmanager
def _environment(env: dict[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(env)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _portable(error: BaseException) -> PackedError | RemoteError:
    """Take ``error`` apart for the way, or return a stand-in where its class cannot be sent."""
    packed = PackedError(type(error), error.args, dict(error.__dict__))
    try:
        shipping.loads(shipping.dumps(packed)).unpack()
    except Exception:
        return RemoteError(f"{type(error).__name__}: {error}")
    return packed


def _close_engines() -> None:
    module = sys.modules.get("polyscale.engine.engine")
    if module is None:
        return
    for obj in gc.get_objects():
        if issubclass(type(obj), module.Engine):
            obj.close()


def _destroy_group() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
