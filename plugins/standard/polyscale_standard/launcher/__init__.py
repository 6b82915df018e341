"""Launcher ``local``: ranks on this host, started and watched by torchrun's elastic agent.

Notable: importing this package imports no torch, so that ``scale run --dry-run`` and the report stay quick.
"""

from __future__ import annotations

from polyscale.hooks import PluginContext, hookimpl
from polyscale_standard.launcher.local import LocalLauncher

__all__ = ["LocalLauncher", "LocalPlugin"]


class LocalPlugin:
    """The plugin behind entry point ``local``."""

    interface_version = (1, 0)

    @hookimpl
    def polyscale_launcher(self, context: PluginContext) -> LocalLauncher:
        """Hand over the launcher of this host."""
        return LocalLauncher()
