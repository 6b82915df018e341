"""Metrics for TensorBoard, under DeepSpeed's names: ``Train/Samples/{lr,loss_scale,train_loss,...}``.

Notable: the horizontal axis is the number of samples seen by all ranks, so runs of different batch sizes and world
sizes can be laid over one another. With several parameter groups the first is ``lr`` and the others ``lr_group_<i>``.
A skipped update writes its loss scale and loss only. tensorboard is imported at the first event.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from polyscale.errors import PolyscaleError
from polyscale.hooks import PluginContext, hookimpl
from polyscale.interfaces.observer import Event, StepTaken

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

PREFIX = "Train/Samples/"
DEFAULT_FOLDER = "runs"
FLUSH_SECONDS = 30


class TensorBoardObserver:
    """Writes the scalars of every update; without a folder it is off."""

    name = "tensorboard"

    def __init__(self, folder: Path | None) -> None:
        """``folder``: where event files go; made at the first event."""
        self._folder = folder
        self._writer: SummaryWriter | None = None

    def enabled(self) -> bool:
        """Whether the section ``tensorboard`` is enabled."""
        return self._folder is not None

    def on_event(self, event: Event) -> None:
        """Write the scalars of an update; other events have none.

        Raises:
            PolyscaleError: tensorboard is not installed, or the folder cannot be written.
        """
        if self._folder is None or not isinstance(event, StepTaken):
            return
        if self._writer is None:
            self._writer = _open(self._folder)
        for name, value in scalars(event):
            self._writer.add_scalar(PREFIX + name, value, event.samples)

    def close(self) -> None:
        """Flush and close the files; a second call does nothing."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()


def scalars(event: StepTaken) -> Iterator[tuple[str, float]]:
    """Yield (name without prefix, value) of what an update has to show."""
    if event.loss is not None:
        yield "train_loss", event.loss
    yield "loss_scale", event.loss_scale
    if event.skipped:
        return
    for index, lr in enumerate(event.lr):
        yield "lr" if index == 0 else f"lr_group_{index}", lr
    if event.grad_norm is not None:
        yield "grad_norm", event.grad_norm
    for part, seconds in event.seconds.items():
        yield f"elapsed_time_ms_{part}", seconds * 1000


def _open(folder: Path) -> SummaryWriter:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise PolyscaleError(
            "tensorboard.enabled=true", why=f"tensorboard cannot be imported: {error}", fix="pip install tensorboard"
        ) from error
    try:
        return SummaryWriter(str(folder), flush_secs=FLUSH_SECONDS)
    except OSError as error:
        raise PolyscaleError(
            f"Writing TensorBoard files to {folder}",
            why=error.strerror or str(error),
            fix="Give another tensorboard.output_path",
        ) from error


class TensorBoardPlugin:
    """Metrics for TensorBoard."""

    interface_version = (1, 0)

    @hookimpl
    def polyscale_observer(self, context: PluginContext) -> TensorBoardObserver:
        """Hand over the observer; it is on when the section ``tensorboard`` is enabled."""
        section = context.config.tensorboard if context.config is not None else None
        if section is None or not section.enabled:
            return TensorBoardObserver(None)
        return TensorBoardObserver(Path(section.output_path or DEFAULT_FOLDER) / section.job_name)
