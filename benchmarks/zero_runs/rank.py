"""The process of one rank: builds its side, then does what the parent asks for, one line of JSON at a time.

Notable: between requests it waits in ``read`` of a socket, not in a collective, so that it uses no processor while
others are measured. It ends when the socket closes, however the parent ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import socket
import time
from dataclasses import asdict
from importlib import metadata
from typing import Any

from zero_runs import models, sides, traffic
from zero_runs.configurations import CONFIGURATIONS, WORLD

LOOK_AFTER_S = 0.03


class Rank:
    """One rank, and the answers it gives."""

    def __init__(self, configuration: str, model: str, device: str) -> None:
        chosen = next(each for each in CONFIGURATIONS if each.name == configuration)
        shape = models.SHAPES[model]
        self._side = sides.make(chosen, shape, device)
        self._batches = models.batches(shape, int(os.environ["RANK"]))
        self._done = 0
        self._shape = shape

    def started(self) -> dict[str, Any]:
        """What the parent is told first: size of the model, and versions."""
        names = ("torch", "transformers", "numpy", "deepspeed", "polyscale-core", "polyscale-zero")
        return {
            "parameters": models.count(self._shape),
            "shape": asdict(self._shape),
            "versions": {name: found for name in names if (found := _version(name))},
        }

    def steps(self, count: int) -> dict[str, Any]:
        """Do ``count`` steps: when they started and ended (the host's clock), losses, work left behind (CPU s)."""
        started = time.monotonic()
        losses = [self._step() for _ in range(count)]
        ended = time.monotonic()
        used = time.process_time()
        time.sleep(LOOK_AFTER_S)
        left = time.process_time() - used
        return {"started": started, "ended": ended, "losses": [float(loss) for loss in losses], "left_s": left}

    def count(self) -> dict[str, Any]:
        """Do one step and count its collectives."""
        return traffic.count_step(self._step, self._side.communication, WORLD)

    def peak(self) -> dict[str, Any]:
        """Do three steps; bytes on the device at rest after the first, and at the peak of the second."""
        import torch

        losses = [float(self._step())]
        torch.accelerator.synchronize()
        rest = torch.accelerator.memory_allocated()
        torch.accelerator.reset_peak_memory_stats()
        losses.append(float(self._step()))
        peak = torch.accelerator.max_memory_allocated()
        losses.append(float(self._step()))
        return {"rest": rest, "peak": peak, "losses": losses}

    def close(self) -> dict[str, Any]:
        """Free what was made."""
        self._side.close()
        return {}

    def _step(self) -> Any:
        batch = self._batches[self._done % len(self._batches)]
        self._done += 1
        return self._side.step(batch.to(self._side.device))


def serve(fd: int, configuration: str, model: str, device: str, *, tuned: bool) -> None:
    """Answer requests on the socket ``fd`` until it closes; ``tuned``: glibc keeps freed memory."""
    import torch

    torch.set_num_threads(1)
    if tuned:
        _keep_freed_memory()
    with socket.socket(fileno=fd) as channel, channel.makefile("rw", encoding="utf-8") as lines:

        def answer(what: dict[str, Any]) -> None:
            lines.write(json.dumps(what) + "\n")
            lines.flush()

        rank = Rank(configuration, model, device)
        answer(rank.started())
        for line in lines:
            request = json.loads(line)
            wanted = request.pop("do")
            answer(getattr(rank, wanted)(**request))
            if wanted == "close":
                return
    os._exit(0)  # the parent is gone: nothing to say, no one to wait for


def _keep_freed_memory() -> None:
    """Raise glibc's thresholds as polyscale's cpu accelerator does (mallopt(3): M_MMAP_THRESHOLD, M_TRIM_THRESHOLD)."""
    with contextlib.suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        library.mallopt(-3, 32 << 20)
        library.mallopt(-1, 512 << 20)


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""
