"""Printing for people."""

from __future__ import annotations

from typing import TextIO

from rich.console import Console


def console(stream: TextIO) -> Console:
    """A console on ``stream``: 80 columns and no colour where it is not a terminal."""
    return _Console(file=stream, highlight=False)


class _Console(Console):
    """Lets a reader that has gone (``| head``) end the command as any other output of ours does."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError
