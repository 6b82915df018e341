"""The parent's hold on processes: a nursery for each Python, a pair of ranks for each configuration.

Notable: nurseries and ranks are not in the terminal's foreground group, so that Ctrl-C reaches the parent alone, and
they end when their socket closes. A rank that dies is told with the end of its log.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Any, NoReturn

from zero_runs.configurations import WORLD, Configuration
from zero_runs.nursery import WHERE

START_S, ANSWER_S, END_S = 600.0, 150.0, 10.0  # a kernel may be compiled at the start
LOG_LINES = 30
_DROPPED = ("POLYSCALE_ACCELERATOR", "POLYSCALE_HEARTBEAT", "MALLOC_", "TORCHELASTIC_", "GROUP_")


class RankDied(Exception):
    """A rank ended, or gave no answer in time; the message holds the end of its log."""


class Nursery:
    """The process that forks the ranks of one Python.

    Attributes:
        pid: its process id; ranks are its children.
    """

    def __init__(self, python: str, modules: list[str], folder: Path) -> None:
        """``modules``: what is imported beside torch and transformers.

        Raises:
            RankDied: it cannot import them.
        """
        self._log = folder / f"nursery-{len(list(folder.glob('nursery-*')))}.log"
        self._control, theirs = socket.socketpair()
        self._control.settimeout(ANSWER_S)
        script = Path(__file__).parent.parent / "zero.py"
        spec = json.dumps({"fd": theirs.fileno(), "modules": modules})
        with theirs, self._log.open("wb") as output:
            self._process = subprocess.Popen(
                [python, str(script), "--nursery", spec], stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                env=_environment(), pass_fds=[theirs.fileno()], start_new_session=True,
            )  # fmt: skip
        self.pid = self._process.pid
        self._lines = self._control.makefile("r", encoding="utf-8")

    def wait_ready(self) -> None:
        """Wait until it has imported everything.

        Raises:
            RankDied: it could not.
        """
        self._answer("ready", True)

    def fork(self, request: dict[str, Any], channel: socket.socket, log: Path) -> int:
        """Start a rank that answers on ``channel``; returns its process id.

        Raises:
            RankDied: the nursery itself has ended.
        """
        with log.open("wb") as output, contextlib.suppress(OSError):
            request = {**request, "label": log.name}
            socket.send_fds(self._control, [json.dumps(request).encode()], [channel.fileno(), output.fileno()])
        pid: int = self._answer("forked", log.name)["pid"]
        return pid

    def code(self, pid: int, *, wait: bool) -> int | None:
        """How a rank ended (negative: by which signal); None while it runs.

        Raises:
            RankDied: the nursery itself has ended.
        """
        with contextlib.suppress(OSError):
            self._control.sendall(json.dumps({"reap": pid, "wait": wait}).encode())
        code: int | None = self._answer("reaped", pid)["code"]
        return code

    def kill(self) -> None:
        """End it, and with it all its ranks."""
        self._lines.close()
        self._control.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _answer(self, key: str, value: Any) -> dict[str, Any]:
        """The answer that holds ``key``: ``value``; earlier ones belong to requests that Ctrl-C has cut short."""
        answer: dict[str, Any] = {}
        while answer.get(key) != value:
            try:
                line = self._lines.readline()
            except TimeoutError:
                self._process.kill()
                line = ""
            if not line:
                self._raise_ended()
            answer = json.loads(line)
        return answer

    def _raise_ended(self) -> NoReturn:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_S)
        log = "\n".join(f"    {each}" for each in _tail(self._log))
        raise RankDied(f"the process that forks ranks {_how(self._process.poll())}; end of its log:\n{log}")


class Pair:
    """The ranks of one configuration.

    Attributes:
        configuration: what they run.
        pids: process ids by rank.
        about: what rank 0 says of itself once it is ready: parameters, shape, versions.
    """

    def __init__(
        self, configuration: Configuration, model: str, nursery: Nursery, folder: Path, *, device: str, tuned: bool
    ) -> None:
        self.configuration = configuration
        self.pids: list[int] = []
        self.about: dict[str, Any] = {}
        self._nursery = nursery
        self._codes: dict[int, int] = {}
        self._logs = [folder / f"{configuration.name}-{device}-rank{rank}.log" for rank in range(WORLD)]
        self._channels: list[socket.socket] = []
        self._buffers = [b""] * WORLD
        self._selector = selectors.DefaultSelector()
        port = _free_port()
        what = {"configuration": configuration.name, "model": model, "device": device, "tuned": tuned}
        for rank, log in enumerate(self._logs):
            ours, theirs = socket.socketpair()
            self._channels.append(ours)
            self._selector.register(ours, selectors.EVENT_READ, rank)
            with theirs:
                request = {"rank": what, "environment": _of_rank(rank, port)}
                self.pids.append(nursery.fork(request, theirs, log))

    def wait_started(self) -> None:
        """Wait until both are ready.

        Raises:
            RankDied: one ended, or is not ready in time.
        """
        self.about = self._answers("start", START_S)[0]

    def ask(self, do: str, **request: Any) -> list[dict[str, Any]]:
        """Ask both ranks at once, and wait for both answers, by rank.

        Raises:
            RankDied: one ended, or does not answer.
        """
        line = json.dumps({"do": do, **request}).encode() + b"\n"
        try:
            for channel in self._channels:
                channel.sendall(line)
        except OSError:
            raise self._died(do) from None
        return self._answers(do, ANSWER_S)

    def close(self) -> None:
        """Let both end in an orderly way; one that does not is killed."""
        with contextlib.suppress(RankDied):
            self.ask("close")
            end = time.monotonic() + END_S
            while time.monotonic() < end and not all(self._code(pid) is not None for pid in self.pids):
                time.sleep(0.02)
        self.kill()

    def kill(self) -> None:
        """End both now, with all that they started."""
        for pid in self.pids:
            with contextlib.suppress(RankDied):  # the nursery has ended: nobody knows how they did
                if self._code(pid) is not None:
                    continue
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            with contextlib.suppress(RankDied):
                self._code(pid, wait=True)
        for channel in self._channels:
            channel.close()
        self._selector.close()

    def _code(self, pid: int, *, wait: bool = False) -> int | None:
        if pid not in self._codes:
            code = self._nursery.code(pid, wait=wait)
            if code is None:
                return None
            self._codes[pid] = code
        return self._codes[pid]

    def _answers(self, what: str, seconds: float) -> list[dict[str, Any]]:
        found: dict[int, dict[str, Any]] = {}
        end = time.monotonic() + seconds
        while len(found) < WORLD:
            ready = self._selector.select(max(0.0, end - time.monotonic()))
            if not ready:
                raise self._died(what, f"no answer in {seconds:g} s")
            for key, _ in ready:
                data = _receive(self._channels[key.data])
                if not data and key.data in found:  # it has answered, and ended before the other has
                    self._selector.unregister(key.fileobj)
                    continue
                if not data:
                    raise self._died(what)
                self._buffers[key.data] += data
                line, separator, rest = self._buffers[key.data].partition(b"\n")
                if separator:
                    found[key.data], self._buffers[key.data] = json.loads(line), rest
        return [found[rank] for rank in range(WORLD)]

    def _died(self, what: str, why: str = "") -> RankDied:
        """Say how both ranks ended, or that they still run and where, with the ends of their logs."""
        if why:
            for pid in self.pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, WHERE)
            time.sleep(1.0)
        end = time.monotonic() + 2.0
        while time.monotonic() < end and not why and all(self._code(pid) is None for pid in self.pids):
            time.sleep(0.02)
        lines = [f"{self.configuration.name}: {why or 'a rank ended'} at {what!r}"]
        for rank, (pid, log) in enumerate(zip(self.pids, self._logs, strict=True)):
            lines += [f"  rank {rank} (process {pid}) {_how(self._code(pid))}; end of its log:"]
            lines += [f"    {line}" for line in _tail(log)]
        return RankDied("\n".join(lines))


def python_lacks(python: str, module: str) -> str:
    """Say why ``python`` cannot import ``module``; "" where it can."""
    code = f"import importlib.util, sys; sys.exit(0 if importlib.util.find_spec({module!r}) else 3)"
    try:
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{python} cannot be run: {error}"
    if done.returncode == 3:
        return f"{module} is not installed for {python}"
    return "" if done.returncode == 0 else f"{python} ended with code {done.returncode}: {done.stderr.strip()[-200:]}"


def _environment() -> dict[str, str]:
    """Variables of all processes, whatever the user's shell holds of ranks."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_DROPPED)}
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    others = {"POLYSCALE_TIMEOUT": "60", "DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    return {**kept, **threads, **others}


def _of_rank(rank: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(WORLD), "LOCAL_WORLD_SIZE": str(WORLD),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": _loopback(),
    }  # fmt: skip


def _loopback() -> str:
    return next((name for _, name in socket.if_nameindex() if name.rstrip("0123456789") == "lo"), "lo")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _receive(channel: socket.socket) -> bytes:
    try:
        return channel.recv(1 << 20)
    except ConnectionError:
        return b""


def _how(code: int | None) -> str:
    if code is None:
        return "still runs"
    if code < 0:
        return f"was killed by signal {-code} ({signal.Signals(-code).name})"
    return f"ended with code {code}"


def _tail(log: Path) -> list[str]:
    try:
        lines = log.read_text(errors="replace").splitlines()
    except OSError:
        return []
    return lines[-LOG_LINES:] or ["(empty)"]
