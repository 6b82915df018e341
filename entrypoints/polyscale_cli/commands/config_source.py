"""Where the commands of ``scale config`` read from: a path, JSON text, or stdin."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from polyscale.config.errors import SourceError
from polyscale.config.source import is_text, parse

STDIN = "-"


def read_source(source: str) -> str | Mapping[str, Any]:
    """Return what ``load_config`` takes; ``-`` reads stdin to its end.

    Raises:
        SourceError: what stdin holds is no configuration.
    """
    if source != STDIN:
        return source
    try:
        text = sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise SourceError("stdin", why=f"it cannot be read: {error}") from None
    if not text.strip():
        raise SourceError(
            "stdin", why="it is empty", fix="Send a configuration: scale config init | scale config check -"
        )
    return parse(text, "stdin")


def named(source: str) -> str:
    """What to call ``source`` in a sentence."""
    return "The configuration" if source == STDIN or is_text(source) else source
