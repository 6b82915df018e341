"""The only file of core that reads the environment."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

ACCELERATOR = "POLYSCALE_ACCELERATOR"
TIMEOUT = "POLYSCALE_TIMEOUT"
HEARTBEAT = "POLYSCALE_HEARTBEAT"
CACHE = "POLYSCALE_CACHE"
DEFAULT_TIMEOUT_S = 600.0
DEFAULT_HEARTBEAT_S = 60.0


@dataclass(frozen=True)
class Launch:
    """What the launcher told this process (torchrun's names)."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int

    @property
    def launched(self) -> bool:
        """Whether there is a rendezvous to join."""
        return "MASTER_ADDR" in os.environ and "RANK" in os.environ


def launch() -> Launch:
    """Read rank and world from the environment; a plain ``python script.py`` is a world of 1."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    return Launch(
        rank=int(os.environ.get("RANK", "0")),
        world_size=world,
        local_rank=int(os.environ.get("LOCAL_RANK", "0")),
        local_world_size=int(os.environ.get("LOCAL_WORLD_SIZE", str(world))),
    )


def accelerator_override() -> str | None:
    """Accelerator named by ``POLYSCALE_ACCELERATOR``, which wins over the configuration."""
    return os.environ.get(ACCELERATOR) or None


def timeout_s() -> float:
    """Seconds that ranks wait for one another (``POLYSCALE_TIMEOUT``)."""
    return _positive(TIMEOUT, DEFAULT_TIMEOUT_S)


def heartbeat_s() -> float:
    """Seconds without a sign of life after which a rank on another host counts as dead (``POLYSCALE_HEARTBEAT``)."""
    return _positive(HEARTBEAT, DEFAULT_HEARTBEAT_S)


def local_rank(rank: int) -> int:
    """Number of this rank on its host; without a launcher that says so, ``rank`` itself (one host)."""
    return int(os.environ.get("LOCAL_RANK", str(rank)))


def master_address() -> str:
    """Host of the rendezvous (``MASTER_ADDR``), or ""."""
    return os.environ.get("MASTER_ADDR", "")


def gloo_interface(default: str) -> str:
    """Network interface that gloo uses; ``default`` is set for this process unless the user has named one."""
    return os.environ.setdefault("GLOO_SOCKET_IFNAME", default)


def _positive(name: str, default: float) -> float:
    text = os.environ.get(name)
    if not text:
        return default
    from polyscale.errors import ConfigError

    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if value <= 0:
        raise ConfigError(
            f"{name}={text!r}", why="it must be a positive number of seconds", fix=f"Unset it for {default:g}"
        )
    return value


def device_mask(variable: str) -> str | None:
    """Value of an accelerator's ``visible_devices_variable``; None where it has none or it is not set."""
    return os.environ.get(variable) if variable else None


def cache_folder() -> Path:
    """Folder of what can be made again, such as built kernels: ``POLYSCALE_CACHE``, else the user's cache folder."""
    named = os.environ.get(CACHE)
    if named:
        return Path(named).expanduser().absolute()
    import platformdirs

    return platformdirs.user_cache_path("polyscale", appauthor=False)


def compiler() -> str | None:
    """The C++ compiler named by ``CXX``."""
    return os.environ.get("CXX") or None


def compiler_environment(temporary: Path) -> dict[str, str]:
    """The environment of compilers: messages in English, temporary files in ``temporary``."""
    folder = str(temporary)
    return {**os.environ, "LC_ALL": "C", "TMPDIR": folder, "TMP": folder, "TEMP": folder}


def compiler_search() -> list[str]:
    """Variables by which compilers find headers and libraries, as "NAME=value"; those that are set."""
    names = ("CPATH", "CPLUS_INCLUDE_PATH", "LIBRARY_PATH")
    return [f"{name}={os.environ[name]}" for name in names if os.environ.get(name)]


def autoload_off() -> str | None:
    """Value that keeps torch from loading out-of-tree backends (``TORCH_DEVICE_BACKEND_AUTOLOAD``); None: it loads."""
    value = os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1")
    return None if value == "1" else value
