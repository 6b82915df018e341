"""What must be equal on all ranks: its hash, and the differences between two ranks' configurations."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

from polyscale.config.errors import UnknownKeyError
from polyscale.config.origin import leaves
from polyscale.errors import nearest

MAY_DIFFER = frozenset(
    {"steps_per_print", "memory_breakdown", "dump_state", "log_level", "tensorboard", "csv_monitor", "wandb", "comet"}
)
"""Top-level keys that only change what a rank prints."""


def _shared(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key not in MAY_DIFFER}


def digest(values: Mapping[str, Any]) -> str:
    """Return 16 hexadecimal digits over the values that must be equal, independent of the order of keys."""
    text = json.dumps(_shared(values), sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def differences(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """Return (path, mine, theirs) in the order of paths; None stands for a value that is absent."""
    left, right = dict(leaves(_shared(mine))), dict(leaves(_shared(theirs)))
    paths = sorted(left.keys() | right.keys())
    return [(path, left.get(path), right.get(path)) for path in paths if left.get(path) != right.get(path)]


def refuse_unknown_options(options: Mapping[str, Any], plugins: Iterable[str]) -> None:
    """Raise when options are given for a plugin that does not exist."""
    names = sorted(plugins)
    for name in options:
        if name not in names:
            close = nearest(name, names)
            raise UnknownKeyError(
                f"backends.options.{name}",
                why="no plugin of that name is installed",
                fix=(f"Did you mean {close!r}? " if close else "") + f"Installed: {', '.join(names)}",
            )
