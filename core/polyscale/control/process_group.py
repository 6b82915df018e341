"""The default process group: taken as the user made it, or made once per process, and ended at exit.

Notable: three starts, told apart without asking. A group that exists is used and left alone. A launcher's environment
(torchrun, ``scale run``, or any that sets MASTER_ADDR and RANK) is followed. Otherwise the process is a world of 1
over a store in memory. On one host gloo is kept on the loopback interface: it then needs no host name that resolves.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING, Any

from polyscale import _torch, background, env
from polyscale.control.agreement import Control
from polyscale.errors import ConfigError, RankError, UnsupportedError

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

    from polyscale.interfaces.accelerator import Accelerator
    from polyscale.interfaces.communication import Communication

_FINISH_S = 5.0


@dataclass
class _Process:
    """What this process keeps: the control of the current default group, and what must happen at exit."""

    pid: int = field(default_factory=os.getpid)
    group: Any = None
    control: Control | None = None
    owned: Any = None
    generation: int = 0


def ensure_process_group(communication: Communication, accelerator: Accelerator) -> Control:
    """Return the control between ranks, after making the default process group if there is none.

    Calls with the same default group return the same object.

    Raises:
        RankError: the other ranks cannot be reached, do not come in time, or have chosen another backend.
        ConfigError: the launcher's environment is incomplete.
        UnsupportedError: this torch was built without distributed support.
    """
    import torch.distributed as dist

    if not dist.is_available():
        raise UnsupportedError("torch.distributed", why="This torch was built without it", fix="Install another build")
    process = _process()
    if process.pid != os.getpid():  # forked from a process that had one
        _process.cache_clear()
        process = _process()
    if not dist.is_initialized():
        chosen = f"{communication.name} of {accelerator.name}"
        _initialize(communication.backend(accelerator.device_type), chosen, process.generation)
        process.owned = dist.group.WORLD
    if process.control is None or process.group is not dist.group.WORLD:
        if process.control is not None and process.control.watch is not None:
            process.control.watch.abandon()
        process.group = dist.group.WORLD
        process.generation += 1
        namespace = f"polyscale/{process.generation}"
        store = dist.PrefixStore(namespace, _torch.default_store())  # type: ignore[attr-defined]
        process.control = Control(store, dist.get_rank(), dist.get_world_size())
    return process.control


@cache
def _process() -> _Process:
    process = _Process()
    background.prepare()  # collectives that are under way may go on until all ranks have come to their end
    background.at_process_end(_end_process_group)
    return process


def _end_process_group() -> None:
    import torch.distributed as dist

    process = _process()
    if process.pid != os.getpid():
        return
    watch = process.control.watch if process.control is not None else None
    # After an uncaught exception the others may not answer any more, and an orderly end could wait for them.
    falling = watch is not None and watch.falling
    if process.control is not None and not falling:
        with contextlib.suppress(RankError):
            process.control.finish(_FINISH_S)
    if watch is not None:
        watch.leave()
    if not falling and process.owned is not None and dist.is_initialized() and dist.group.WORLD is process.owned:
        dist.destroy_process_group()
    process.owned = process.group = process.control = None


def _initialize(backend: str, chosen: str, generation: int) -> None:
    """``chosen``: the plugins that the backend is of, for errors; ``generation``: groups that there were before."""
    import torch.distributed as dist

    launch = env.launch()
    timeout = timedelta(seconds=env.timeout_s())
    if not launch.launched:
        if launch.world_size > 1:
            raise ConfigError(
                f"WORLD_SIZE={launch.world_size} without MASTER_ADDR and RANK",
                why="A rank must know where to meet the others",
                fix="Start with 'scale run' or torchrun, or unset WORLD_SIZE for a single process",
            )
        alone = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=alone, rank=0, world_size=1, timeout=timeout)
        return
    if not 0 <= launch.rank < launch.world_size:
        raise ConfigError(
            f"RANK={launch.rank}", why=f"With WORLD_SIZE={launch.world_size} ranks go from 0 to {launch.world_size - 1}"
        )
    if launch.local_world_size == launch.world_size or _is_loopback(env.master_address()):
        _keep_gloo_on_loopback()
    try:
        store = _met(launch, timeout, f"{backend} ({chosen})", generation)
        dist.init_process_group(backend, store=store, rank=launch.rank, world_size=launch.world_size, timeout=timeout)
    except (RuntimeError, ValueError) as error:
        raise RankError(
            f"rank {launch.rank} of {launch.world_size} cannot join the others at {env.master_address()}",
            why=str(error).strip().split("\n", 1)[0],
            fix=f"Check that all ranks were started and reach MASTER_ADDR; {env.TIMEOUT} sets how long to wait",
        ) from error


def _met(launch: env.Launch, timeout: timedelta, own: str, generation: int) -> Store:
    """The store of the default group, once all ranks have said ``own``; with another backend each would wait in vain.

    Raises:
        RankError: on every rank, where two have chosen different ones.
        RuntimeError: the others do not come in time (torch's own errors).
    """
    import torch.distributed as dist
    from torch.distributed.rendezvous import rendezvous

    store, _, _ = next(rendezvous("env://", timeout=timeout))
    store.set_timeout(timeout)
    said = dist.PrefixStore(f"polyscale/backends/{generation}", store)  # type: ignore[attr-defined]
    said.set(str(launch.rank), own)
    if launch.rank == 0:
        keys = [str(rank) for rank in range(launch.world_size)]
        said.wait(keys)
        told = [text.decode() for text in said.multi_get(keys)]
        other = next((rank for rank, text in enumerate(told) if text != own), None)
        said.set("verdict", "" if other is None else f"rank 0 uses {own}, rank {other} {told[other]}")
    if verdict := said.get("verdict").decode():
        said.add("readers", 1)
        end = time.monotonic() + _FINISH_S  # rank 0 may hold the store
        while launch.rank == 0 and said.add("readers", 0) < launch.world_size and time.monotonic() < end:
            time.sleep(0.01)
        raise RankError(
            f"Ranks use different collectives: {verdict}",
            why="Ranks of one training need the same, and what 'auto' finds may differ between hosts",
            fix="Give all ranks one configuration; 'scale-report' on each host says what is usable there, and why not",
        )
    return dist.PrefixStore(f"default_pg/{generation}", store)  # type: ignore[attr-defined]


def _is_loopback(host: str) -> bool:
    return host in ("localhost", "::1", "ip6-localhost") or host.startswith("127.")


def _keep_gloo_on_loopback() -> None:
    try:
        names = [name for _, name in socket.if_nameindex()]
    except OSError:
        return
    for name in ("lo", "lo0"):
        if name in names:
            env.gloo_interface(name)
            return
