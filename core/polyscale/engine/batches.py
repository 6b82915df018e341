"""Runs whole accumulations from an iterator: what ``train_batch`` and ``eval_batch`` do.

A batch may be a mapping (given to the model as keywords), or a tuple or list (given in order). Without ``loss_fn`` the
model's output is the loss, or has it as ``.loss``, ``["loss"]`` or its first element. With ``loss_fn`` a mapping gives
``loss_fn(output, batch)`` and a tuple ``loss_fn(output, last element)``, the last element not being given to the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from polyscale._torch import tree_map
from polyscale.errors import PolyscaleError

if TYPE_CHECKING:
    from polyscale.engine.engine import Engine
    from polyscale.engine.setup import Setup

LossFunction = Callable[..., torch.Tensor]


def to_device(batch: Any, device: torch.device) -> Any:
    """Move the tensors in a nest of containers."""

    def move(item: Any) -> Any:
        return item.to(device, non_blocking=True) if isinstance(item, torch.Tensor) else item

    return tree_map(move, batch)


class BatchRunner:
    """Draws micro-batches, computes losses, and averages them over ranks."""

    def __init__(self, engine: Engine, setup: Setup, loss_fn: LossFunction | None) -> None:
        self._engine = engine
        self._setup = setup
        self._loss_fn = loss_fn
        self._own: Iterator[Any] | None = None

    def train(self, iterator: Iterator[Any] | None) -> torch.Tensor:
        """See ``Engine.train_batch``."""
        engine = self._engine
        wanted = engine.gradient_accumulation_steps
        losses: list[torch.Tensor] = []
        for index in range(wanted):
            batch = self._next(iterator, taken=index, wanted=wanted)
            loss = self._loss(batch)
            engine.backward(loss)
            engine.step()
            losses.append(loss.detach())
        return self._mean(losses)

    def evaluate(self, iterator: Iterator[Any] | None) -> torch.Tensor:
        """See ``Engine.eval_batch``."""
        engine = self._engine
        modes = [(module, module.training) for module in engine.module.modules()]
        engine.eval()
        losses: list[torch.Tensor] = []
        try:
            with torch.no_grad():
                for _ in range(engine.gradient_accumulation_steps):
                    losses.append(self._loss(self._next(iterator, taken=0, wanted=1)))
        except StopIteration:
            if not losses:
                raise
        finally:
            for module, training in modes:  # a part that the user keeps in evaluation mode stays so
                module.training = training
        return self._mean(losses)

    def _next(self, iterator: Iterator[Any] | None, *, taken: int, wanted: int) -> Any:
        if iterator is None:
            iterator = self._own_iterator()
        try:
            return next(iterator)
        except StopIteration:
            self._own = None
            if taken == 0:
                raise
            raise PolyscaleError(
                f"The iterator ended after {taken} of {wanted} micro-batches",
                why="an update needs gradient_accumulation_steps of them",
                fix="Call engine.flush() to update with what came, or give a loader whose length is a multiple",
            ) from None
        except TypeError as error:
            raise PolyscaleError(
                f"train_batch({type(iterator).__name__})", why="it is not an iterator", fix="Pass iter(loader)"
            ) from error

    def _own_iterator(self) -> Iterator[Any]:
        if self._engine.data is None:
            raise PolyscaleError(
                "train_batch() without an iterator",
                why="the engine was made without data",
                fix="Pass iter(loader), or data=dataset to polyscale.initialize",
            )
        if self._own is None:
            self._own = iter(self._engine.data)
        return self._own

    def _loss(self, batch: Any) -> torch.Tensor:
        engine = self._engine
        if isinstance(batch, Mapping):
            output = engine(**batch)
            target: Any = batch
        else:
            items = list(batch) if isinstance(batch, (tuple, list)) else [batch]
            target = items.pop() if self._loss_fn is not None else None
            output = engine(*items)
        if self._loss_fn is not None:
            with engine._guard.doing("loss", timed=False):
                return self._loss_fn(output, to_device(target, engine.device))
        return _find_loss(output)

    def _mean(self, losses: list[torch.Tensor]) -> torch.Tensor:
        mean = torch.stack([loss.detach().float().reshape(()) for loss in losses]).mean()
        topology = self._engine.topology
        if topology.dp_size > 1:
            self._setup.communication.all_reduce(mean, topology.group("batch")).wait()
            mean /= topology.dp_size
        return mean


def _find_loss(output: Any) -> torch.Tensor:
    loss = getattr(output, "loss", None)
    if loss is None and isinstance(output, Mapping):
        loss = output.get("loss")
    if loss is None and isinstance(output, (tuple, list)) and output:
        loss = output[0]
    if loss is None:
        loss = output
    if isinstance(loss, torch.Tensor) and loss.numel() == 1:
        return loss
    shape = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
    raise PolyscaleError(
        f"The model returned {shape}",
        why="there is no scalar loss in it",
        fix="Pass loss_fn to polyscale.initialize, or give the model its labels",
    )
