"""Events as one line of JSON each: ``{"event": "StepTaken", "time": ..., "step": 1, ...}``.

Notable: lines are appended and flushed at once, so a file can be followed and survives a killed run. JSON has no
infinite or undefined numbers; they are written as the strings "inf", "-inf" and "nan". ``time`` is in seconds since
1970. On with ``backends.options.jsonl.path``.
"""

from __future__ import annotations

import dataclasses
import json
import math
import time
from pathlib import Path
from typing import Any, TextIO

from polyscale.errors import ConfigError, PolyscaleError, nearest
from polyscale.hooks import PluginContext, hookimpl
from polyscale.interfaces.observer import Event


class JsonlObserver:
    """Appends every event to a file; without a path it is off."""

    name = "jsonl"

    def __init__(self, path: Path | None) -> None:
        """``path``: the file; its folder is made at the first event."""
        self._path = path
        self._file: TextIO | None = None

    def enabled(self) -> bool:
        """Whether a path was given."""
        return self._path is not None

    def on_event(self, event: Event) -> None:
        """Append one line.

        Raises:
            PolyscaleError: the file cannot be written.
        """
        if self._path is None:
            return
        line = {"event": type(event).__name__, "time": time.time(), **dataclasses.asdict(event)}
        try:
            if self._file is None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._file = self._path.open("a", encoding="utf-8")
            self._file.write(json.dumps(_plain(line), allow_nan=False) + "\n")
            self._file.flush()
        except OSError as error:
            raise PolyscaleError(
                f"Writing events to {self._path}",
                why=error.strerror or str(error),
                fix="Give another backends.options.jsonl.path",
            ) from error

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        file, self._file = self._file, None
        if file is not None:
            file.close()


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


class JsonlPlugin:
    """Events as lines of JSON."""

    interface_version = (1, 0)

    @hookimpl
    def polyscale_observer(self, context: PluginContext) -> JsonlObserver:
        """Hand over the observer; it is on when ``backends.options.jsonl.path`` is set.

        Raises:
            ConfigError: an option is unknown, or the path is none.
        """
        for key in context.options:
            if key != "path":
                close = nearest(key, ["path"])
                raise ConfigError(
                    f"backends.options.jsonl.{key}",
                    why="There is no such option",
                    fix=(f"Did you mean {close!r}? " if close else "") + "Valid: path",
                )
        if not context.options:
            return JsonlObserver(None)
        path = context.options["path"]
        if not isinstance(path, str) or not path:
            raise ConfigError(f"backends.options.jsonl.path={path!r}", why="It is no path", fix="Give a file's path")
        return JsonlObserver(Path(path))
