"""ShmCommunication: the collectives of ``polyscale.interfaces.communication`` through shared memory.

Notable: "auto" takes it where all ranks share a host, and the transport is built or can be. Nothing is built before it
has been chosen; where a build then fails on a rank, its groups use gloo on all, and say why once.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from polyscale import env
from polyscale.errors import BuildError, UnsupportedError
from polyscale_communication import NAME, register
from polyscale_communication.settings import settings_of
from polyscale_standard.communication.c10d import Backend, C10dCommunication

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

logger = logging.getLogger("polyscale")
_SUMS = {name: name for name in ("fp64", "fp32", "int64", "int32", "int16", "int8", "uint8")}
_NARROW = {"bf16": "fp32", "fp16": "fp32"}


class ShmCommunication(C10dCommunication):
    """Collectives of ranks on one host. ``group=None`` is the default group."""

    def __init__(self, options: Mapping[str, Any], *, used: bool = False) -> None:
        """``options``: see ``settings``; ``used``: for a training rather than a report.

        Raises:
            ConfigError: there is no such option, or not with this value.
        """
        super().__init__(Backend(NAME, MappingProxyType({**_SUMS, **_NARROW}), host=True))
        self._settings = settings_of(options)
        self._options = dict(options)
        self._used = used

    def why_unavailable(self) -> str:
        """Say what is missing here; "" where it can be used."""
        why = self._why_not()
        if why and self._used:
            _say_once(f"Communication {NAME} cannot be used: {why}")
        return why

    def _why_not(self) -> str:
        import torch
        import torch.distributed as dist

        if not sys.platform.startswith("linux"):
            return f"it needs Linux, and this is {sys.platform}"
        if not dist.is_available():
            return f"this torch ({torch.__version__}) is built without torch.distributed"
        if not self._settings.enabled:
            return "backends.options.shm.enabled is false"
        launch = env.launch()
        if launch.local_world_size != launch.world_size:
            return f"{launch.local_world_size} of {launch.world_size} ranks are on this host, and it serves one host"
        return _no_memory() or _no_transport(chosen=self._used)

    def backend(self, device_type: str) -> str:
        """The string for ``init_process_group``; the transport is built where it has not been built yet.

        Raises:
            UnsupportedError: it moves tensors of the host only.
        """
        if device_type != "cpu":
            raise UnsupportedError(
                f"Communication {NAME!r} for device type {device_type!r}",
                why="It moves tensors of the host",
                fix="Name another one in backends.communication, or 'auto'",
            )
        register(**self._options)
        from polyscale_shm import native

        with contextlib.suppress(BuildError):  # the ranks of a group agree on what one of them lacks
            native()
        return NAME

    def allocate(self, numel: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """An uninitialised 1-D buffer; of the host: one that other ranks read in place."""
        if device.type != "cpu":
            return super().allocate(numel, dtype=dtype, device=device)
        from polyscale_communication.memory import allocate

        return allocate(numel, dtype)

    def shared(self, numel: int, *, dtype: torch.dtype, group: ProcessGroup | None = None) -> torch.Tensor:
        """One piece of memory that all ranks of the group have, as a 1-D tensor of zeros. Collective.

        Raises:
            UnsupportedError: on every rank, where one cannot have it, with the reason.
        """
        from polyscale_communication.memory import shared

        return shared(numel, dtype, group)


@lru_cache(maxsize=1)
def _no_memory() -> str:
    """Why this process gets no shared memory; "" where it does."""
    try:
        descriptor = os.memfd_create("polyscale")
    except (OSError, AttributeError) as error:
        return f"shared memory is refused: memfd_create: {error}"
    try:
        os.posix_fallocate(descriptor, 0, 4096)
    except OSError as error:
        return f"shared memory is refused: fallocate: {error}"
    finally:
        os.close(descriptor)
    return ""


@lru_cache(maxsize=2)
def _no_transport(*, chosen: bool) -> str:
    """Why the extension is not there and cannot be built; "" where it is or can. Builds nothing.

    ``chosen``: for a training, whose ranks must come to one answer: a build that another rank has tried meanwhile, and
    that has failed, makes no difference to this one. Its group hears of it from that rank.
    """
    from polyscale.ops import status
    from polyscale_shm.library import MODULE

    state = status(MODULE)
    if state.state != "cannot build" or (chosen and state.failed):
        return ""
    return f"its transport cannot be built: {state.why.rstrip('.')}" + (f"; {state.fix}" if state.fix else "")


@lru_cache(maxsize=8)
def _say_once(message: str) -> None:
    logger.log(logging.WARNING if env.launch().rank == 0 else logging.INFO, "%s", message)
