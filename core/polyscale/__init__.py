"""polyscale: train and serve deep-learning models that do not fit one device, on whatever devices are installed.

Importing this package imports no torch, touches no device and starts nothing: names are loaded when first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_LAZY = {
    "initialize": "polyscale.engine.initialize",
    "Engine": "polyscale.engine.engine",
    "Topology": "polyscale.topology",
    "partitioned_init": "polyscale.parameters.deferred",
    "Config": "polyscale.config",
    "load_config": "polyscale.config",
    "hookimpl": "polyscale.hooks",
    "PluginContext": "polyscale.hooks",
    "PolyscaleError": "polyscale.errors",
    "ConfigError": "polyscale.errors",
    "PluginError": "polyscale.errors",
    "UnsupportedError": "polyscale.errors",
    "CheckpointError": "polyscale.errors",
    "RankError": "polyscale.errors",
}
_MODULES = ("data", "errors", "hooks")

__all__ = sorted([*_LAZY, "__version__", "data"])

if TYPE_CHECKING:
    from polyscale import data as data
    from polyscale.config import Config as Config
    from polyscale.config import load_config as load_config
    from polyscale.engine.engine import Engine as Engine
    from polyscale.engine.initialize import initialize as initialize
    from polyscale.errors import CheckpointError as CheckpointError
    from polyscale.errors import ConfigError as ConfigError
    from polyscale.errors import PluginError as PluginError
    from polyscale.errors import PolyscaleError as PolyscaleError
    from polyscale.errors import RankError as RankError
    from polyscale.errors import UnsupportedError as UnsupportedError
    from polyscale.hooks import PluginContext as PluginContext
    from polyscale.hooks import hookimpl as hookimpl
    from polyscale.parameters.deferred import partitioned_init as partitioned_init
    from polyscale.topology import Topology as Topology


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        value = getattr(import_module(_LAZY[name]), name)
    elif name in _MODULES:
        value = import_module(f"polyscale.{name}")
    else:
        raise AttributeError(f"module 'polyscale' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
