"""Launcher: starts ranks on hosts and waits for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable


@dataclass(frozen=True)
class LaunchRequest:
    """What to run.

    Attributes:
        command: program and arguments; a Python script runs under this interpreter.
        nproc: ranks per host.
        log_dir: directory for one file per rank, or None.
        env: variables added for every rank.
    """

    command: Sequence[str]
    nproc: int = 1
    log_dir: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)


@runtime_checkable
class Launcher(Protocol):
    """Starts ranks."""

    name: str

    def is_available(self) -> bool:
        """Return whether it can start ranks here; never raises."""

    def why_unavailable(self) -> str:
        """Say what is missing; "" when available."""

    def plan(self, request: LaunchRequest) -> list[str]:
        """The command lines that ``run`` would start, one per rank or host (``--dry-run``)."""

    def run(self, request: LaunchRequest) -> int:
        """Start, follow and end all ranks; returns the exit code of the first that failed, or 0; 130 on SIGINT."""
