"""The process that imports torch once and forks ranks: ``python -m polyscale.testing.zygote FD``.

Notable: importing torch takes about 4 s of CPU time, forking this process a few milliseconds, so a pool of any size
costs one import per session and a killed rank is replaced at once. Forking is safe because nothing here starts a
thread: no process group, no backward, one OpenMP thread. A rank never outlives its parent: it and this process end as
soon as the socket to the parent closes, however the parent ended.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import time
from typing import Any

from polyscale.testing import shipping

KILLED_AFTER_S = 5.0


def main(fd: int) -> None:
    """Serve requests of the parent on the socket ``fd`` until it closes; then kill every rank that is left."""
    control = socket.socket(fileno=fd)
    children: set[int] = set()
    _preload()
    _reply(control, "ready")
    while True:
        data, fds, _, _ = socket.recv_fds(control, 1 << 16, 2)
        if not data:
            break
        request = shipping.loads(data)
        if request[0] == "fork":
            _reply(control, _fork(control, children, request[1], fds))
        elif request[0] == "reap":
            _reply(control, _reap(children, request[1]))
    for pid in children:
        kill_group(pid)


def kill_group(pid: int) -> None:
    """Kill a rank and what it started (each rank leads its own process group)."""
    for kill in (os.killpg, os.kill):
        try:
            kill(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            continue


def _preload() -> None:
    import gc

    import torch.distributed.fsdp
    import torch.distributed.tensor  # noqa: F401

    gc.collect()
    gc.freeze()


def _reply(control: socket.socket, value: Any) -> None:
    control.sendall(shipping.dumps(value))


def _fork(control: socket.socket, children: set[int], settings: dict[str, Any], fds: list[int]) -> int:
    pid = os.fork()
    if pid == 0:
        control.close()
        _become_rank(settings, *fds)
    for fd in fds:
        os.close(fd)
    children.add(pid)
    return pid


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


def _reap(children: set[int], pid: int) -> int:
    """Wait for the end of ``pid``, killing it when it does not come; return its exit code, -N for signal N."""
    deadline = time.monotonic() + KILLED_AFTER_S
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            children.discard(pid)
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            kill_group(pid)
        select.select([], [], [], 0.01)


if __name__ == "__main__":
    main(int(sys.argv[1]))
