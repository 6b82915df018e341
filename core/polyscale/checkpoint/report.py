"""LoadReport: what a load did, part by part."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_SHOWN = 6


@dataclass(frozen=True)
class LoadReport:
    """What ``engine.load`` restored.

    Attributes:
        restored: parts that are now as they were when saved ("parameters", "optimizer", "rng", ...).
        absent: parts that the engine has and the checkpoint lacks; they are as they were before the load.
        ignored: parts that the checkpoint holds and the engine has no use for.
        tag: the checkpoint.
        step: updates done when it was saved.
        client_state: what ``engine.save(client_state=...)`` was given, or None.
    """

    restored: tuple[str, ...]
    absent: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    tag: str = ""
    step: int = 0
    client_state: Any = None

    def __str__(self) -> str:
        parts = (("restored", self.restored), ("absent, left as they were", self.absent), ("ignored", self.ignored))
        said = "; ".join(f"{name}: {_listed(entries)}" for name, entries in parts if entries)
        return f"Loaded '{self.tag}' at step {self.step}. {said or 'It held nothing'}."


def _listed(entries: tuple[str, ...]) -> str:
    more = f" and {len(entries) - _SHOWN} more" if len(entries) > _SHOWN else ""
    return ", ".join(entries[:_SHOWN]) + more
