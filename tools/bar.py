"""The progress bar of the demo: live on a terminal, a line at every validation elsewhere. Everything goes to stderr."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


class Bar:
    """Shows step, loss, tokens per second and memory.

    Args:
        title: what runs.
        total: updates at the end.
        done: updates at the beginning.
    """

    def __init__(self, title: str, total: int, *, done: int = 0) -> None:
        self._title, self._total = title, total
        self._console = Console(stderr=True, highlight=False)
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[numbers]}"),
            TimeElapsedColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._progress.add_task(title, total=total, completed=done, numbers="starting ranks")
        self._training = self._validation = ""

    def __enter__(self) -> Bar:
        if self._progress.disable:
            self.say(f"{self._title}: starting ranks")
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        self._progress.stop()

    def move(self, record: dict[str, Any]) -> None:
        """Take one record of rank 0."""
        step = record["step"]
        if "loss" in record:
            speed, memory = record["tokens_per_s"], record["memory_mb"]
            self._training = f"loss {record['loss']:.3f}  {speed:,} tokens/s  {memory:,} MB"
        if "validation_loss" in record:
            self._validation = f"validation {record['validation_loss']:.3f}"
        numbers = "  ".join(filter(None, (self._training, self._validation)))
        self._progress.update(self._task, completed=step, numbers=numbers)
        if self._progress.disable and "validation_loss" in record:
            self.say(f"{self._title}: {step}/{self._total}  {numbers}")

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        self._console.print(text, markup=False, soft_wrap=True)
