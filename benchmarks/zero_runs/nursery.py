"""The process that imports once and forks ranks, one for each Python: ``zero.py --nursery FD``.

Notable: a rank's imports take seconds of processor time and 250 MiB that it never changes; forked ranks share both, so
that all configurations fit one machine. Forking is safe here because nothing has started a thread yet: no process
group, no backward. This process ends with all its ranks as soon as the socket to the parent closes.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import json
import os
import signal
import socket
import sys
import traceback
from typing import Any

MESSAGE_BYTES = 1 << 16
WHERE = signal.SIGUSR1  # asks a rank to write where it is to its log


def run(fd: int, modules: list[str]) -> None:
    """Import ``modules``, say so, and fork and reap as the parent asks."""
    children: set[int] = set()
    with socket.socket(fileno=fd) as control:
        for module in ("zero_runs.rank", "torch.distributed.fsdp", "torch.profiler", *modules):
            __import__(module)
        from transformers import GPT2LMHeadModel  # noqa: F401  looked up, and so imported, when named

        gc.collect()
        gc.freeze()
        _send(control, {"ready": True})
        while True:
            try:
                data, fds, _, _ = socket.recv_fds(control, MESSAGE_BYTES, 2)
            except ConnectionError:
                break
            if not data:
                break
            request = json.loads(data)
            if "reap" in request:
                _send(control, _reap(children, **request))
            else:
                _send(control, {"forked": request["label"], "pid": _fork(control, children, request, *fds)})
    for pid in children:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)


def _fork(control: socket.socket, children: set[int], request: dict[str, Any], channel: int, log: int) -> int:
    pid = os.fork()
    if pid:
        os.close(channel)
        os.close(log)
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)  # here too, so that its group exists before anyone kills it
        children.add(pid)
        return pid
    code = 1
    try:
        control.close()
        os.setpgid(0, 0)
        for target in (1, 2):
            os.dup2(log, target)
        os.close(log)
        faulthandler.register(WHERE)
        os.environ.update(request["environment"])
        from zero_runs.rank import serve

        serve(channel, **request["rank"])
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _reap(children: set[int], reap: int, wait: bool) -> dict[str, Any]:
    """How a rank ended, as ``subprocess`` tells it; None while it runs."""
    pid, status = os.waitpid(reap, 0 if wait else os.WNOHANG)
    if not pid:
        return {"reaped": reap, "code": None}
    children.discard(pid)
    return {"reaped": reap, "code": os.waitstatus_to_exitcode(status)}


def _send(control: socket.socket, what: dict[str, Any]) -> None:
    control.sendall(json.dumps(what).encode() + b"\n")
