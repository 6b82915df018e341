"""The process that imports torch once and forks ranks: ``python -m polyscale.testing.zygote FD``.

Notable: importing torch takes about 4 s of CPU time, forking this process a few milliseconds, so a pool of any size
costs one import per session and a killed rank is replaced at once. Forking is safe because nothing here starts a
thread: no process group, no backward, one OpenMP thread. A rank never outlives its parent: it and this process end as
soon as the socket to the parent closes, however the parent ended.
"""

from __future__ import annotations

import gc
import importlib
import os
import select
import signal
import socket
import sys
import time
from typing import Any

from polyscale.testing import framing, shipping

KILLED_AFTER_S = 5.0
# What most cases need: the engine, what torch imports at the first step of an optimizer, the models of the tests.
_PRELOADED = (
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "polyscale.config.load",
    "polyscale.engine.initialize",
    "transformers.models.gpt2.modeling_gpt2",
)
_PRELOADED_KINDS = ("communication", "parallelism", "optimizer", "precision", "observer")


def main(fd: int) -> bytes | None:
    """Serve requests of the parent on the socket ``fd`` until it closes; then kill every rank that is left.

    Returns:
        None; in a fork that is to be a program of its own: (function, arguments) as shipped, to be called.
    """
    control = socket.socket(fileno=fd)
    children: set[int] = set()
    _preload()
    _reply(control, "ready")
    while True:
        message, fds = framing.receive(control, descriptors=2)
        if message is None:
            break
        request = shipping.loads(message)
        if request[0] == "fork":
            _reply(control, _fork(control, children, request[1], fds))
        elif request[0] == "program":
            pid = os.fork()
            if pid == 0:
                control.close()
                _become_program(request[1], *fds)
                return bytes(request[2])
            _adopt(children, pid, fds)
            _reply(control, pid)
        elif request[0] == "reap":
            _reply(control, _reap(children, request[1]))
        elif request[0] == "poll":
            _reply(control, _poll(children, request[1]))
    for pid in children:
        kill_group(pid)
    return None


def kill_group(pid: int) -> None:
    """Kill a rank and what it started (each rank leads its own process group)."""
    for kill in (os.killpg, os.kill):
        try:
            kill(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            continue


def _preload() -> None:
    from polyscale.discovery.catalogue import installed

    plugins = [entry.value.partition(":")[0] for kind in _PRELOADED_KINDS for entry in installed(kind)]
    for module in (*_PRELOADED, *dict.fromkeys(plugins)):
        try:
            importlib.import_module(module)
        except KeyboardInterrupt:
            raise
        except BaseException:  # a module may even exit: a case that needs it will say so
            continue
    gc.collect()
    gc.freeze()


def _reply(control: socket.socket, value: Any) -> None:
    framing.send(control, shipping.dumps(value))


def _fork(control: socket.socket, children: set[int], settings: dict[str, Any], fds: list[int]) -> int:
    pid = os.fork()
    if pid == 0:
        control.close()
        _become_rank(settings, *fds)
    _adopt(children, pid, fds)
    return pid


def _adopt(children: set[int], pid: int, fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)
    children.add(pid)


def _become_rank(settings: dict[str, Any], connection_fd: int, output_fd: int) -> None:
    code = 1
    try:
        os.setsid()
        os.dup2(output_fd, 1)
        os.dup2(output_fd, 2)
        from polyscale.testing import worker

        worker.main(connection_fd, settings)
        code = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _become_program(settings: dict[str, Any], output_fd: int, error_fd: int) -> None:
    """Be what a new interpreter would be: leader of its own processes, with the environment and folder it is given."""
    os.setsid()
    os.dup2(output_fd, 1)
    os.dup2(error_fd, 2)
    os.environ.clear()
    os.environ.update(settings["env"])
    os.chdir(settings["cwd"])
    sys.path.extend(entry for entry in settings["path"] if entry not in sys.path)
    import torch

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))


def _poll(children: set[int], pid: int) -> int | None:
    """The exit code of ``pid``, -N for signal N; None while it runs."""
    done, status = os.waitpid(pid, os.WNOHANG)
    if not done:
        return None
    children.discard(pid)
    return os.waitstatus_to_exitcode(status)


def _reap(children: set[int], pid: int) -> int:
    """Wait for the end of ``pid``, killing it when it does not come; return its exit code, -N for signal N."""
    deadline = time.monotonic() + KILLED_AFTER_S
    while True:
        code = _poll(children, pid)
        if code is not None:
            return code
        if time.monotonic() > deadline:
            kill_group(pid)
        select.select([], [], [], 0.01)


def _run(program: bytes | None) -> None:
    if program is not None:
        function, args = shipping.loads(program)
        function(*args)


if __name__ == "__main__":
    _run(main(int(sys.argv[1])))  # a program ends as any other: by its last line, an exception or sys.exit
