"""Discovery: what is installed, loading one plugin by name, and choosing among plugins.

Notable: listing reads metadata and imports nothing, torch included; only the plugin that is asked for is loaded
(``auto`` asks every accelerator whether it is available, and survives a broken one). Every failure is a
:class:`polyscale.errors.PluginError` that names plugin and distribution.
"""

from polyscale.discovery.catalogue import Installed, installed
from polyscale.discovery.loading import PluginInfo, load, load_value, plugin_info
from polyscale.discovery.selecting import Attempt, Choice, choose, choose_accelerator, select, select_accelerator

__all__ = [
    "Attempt",
    "Choice",
    "Installed",
    "PluginInfo",
    "choose",
    "choose_accelerator",
    "installed",
    "load",
    "load_value",
    "plugin_info",
    "select",
    "select_accelerator",
]
