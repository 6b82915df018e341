"""The plugin ``threads`` and its options ``backends.options.threads``: ``threads`` and ``chunk_bytes``."""

from __future__ import annotations

from polyscale.errors import ConfigError, nearest
from polyscale.hooks import PluginContext, hookimpl
from polyscale_standard.io.threads import CHUNK_BYTES, THREADS, ThreadsIO


class ThreadsPlugin:
    """Reads and writes on a pool of threads."""

    interface_version = (1, 0)

    @hookimpl
    def polyscale_io(self, context: PluginContext) -> ThreadsIO:
        """Hand over an I/O object of its own; its threads start with the first operation.

        Raises:
            ConfigError: an option is unknown or not a positive integer.
        """
        known = {"threads": THREADS, "chunk_bytes": CHUNK_BYTES}
        for key, value in context.options.items():
            if key not in known:
                close = nearest(key, known)
                raise ConfigError(
                    f"backends.options.{context.name}.{key}",
                    why="There is no such option",
                    fix=(f"Did you mean {close!r}? " if close else "") + "Valid: " + ", ".join(known),
                )
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(
                    f"backends.options.{context.name}.{key}={value!r}",
                    why="It must be a positive integer",
                    fix=f"The default is {known[key]}",
                )
        return ThreadsIO(**(known | dict(context.options)))
