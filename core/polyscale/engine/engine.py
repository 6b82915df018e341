"""The engine: forward, backward, step, and everything that must happen around them.

Notable: this class holds the state and delegates the work, one file per concern. Every public call says to the watchdog
what this rank is doing, so that when a rank fails the others can tell who, where and in what.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from polyscale.claims import keep_claim
from polyscale.engine.accumulation import Accumulation
from polyscale.engine.agreeing import agree_on_flush
from polyscale.engine.batches import BatchRunner, LossFunction, to_device
from polyscale.engine.guard import Guard
from polyscale.engine.stepping import Outcome, Stepper, is_printed, tell_step
from polyscale.engine.update import GradientNumbers
from polyscale.errors import PolyscaleError
from polyscale.interfaces.observer import EngineClosed, StepTaken

if TYPE_CHECKING:
    from polyscale.checkpoint.report import LoadReport
    from polyscale.engine.setup import Setup
    from polyscale.interfaces.accelerator import MemoryUse
    from polyscale.parameters.store import ParameterStore
    from polyscale.topology import Topology

log = logging.getLogger("polyscale")


class Engine:
    """Trains one model. Made by :func:`polyscale.initialize`; also a context manager that closes itself.

    Attributes:
        module: the user's model, spread over ranks.
        optimizer: the optimizer over what this rank updates, or None.
        lr_scheduler: its schedule, or None.
        data: the loader made from ``initialize(data=...)``, or None.
        device: where this rank computes.
        topology: meshes and groups; ``.rank``, ``.world_size``.
        parameters_store: whole parameters, gradients and optimizer states by name.
        config: the resolved configuration.
        steps: updates done. ``skipped``: updates skipped for an overflow. ``micro_steps``: micro-steps ended.
        samples: samples seen by all ranks.
    """

    def __init__(self, setup: Setup, *, loss_fn: LossFunction | None) -> None:
        self._setup = setup
        self.module: nn.Module = setup.model
        self.optimizer = setup.optimizer
        self.lr_scheduler = setup.lr_scheduler
        self.data = setup.data
        self.device: torch.device = setup.device
        self.topology: Topology = setup.topology
        self.parameters_store: ParameterStore = setup.applied.store
        self.config = setup.config
        self.steps = self.skipped = self.micro_steps = self.samples = 0
        self._accumulation = Accumulation(setup.batch.accumulation)
        self._stepper = Stepper(setup)
        self._guard = Guard(setup, self._accumulation, self._stepper)
        self._batches = BatchRunner(self, setup, loss_fn)
        self.parameters_store.before_gradients = partial(self._stepper.reduce, self._accumulation)
        self._numbers: GradientNumbers | None = None
        self._tracked: dict[str, Any] = {}
        self._hold = False
        self._closed = False
        if self.data is not None and hasattr(self.data, "state_dict"):
            self.track("data", self.data)

    # Training.

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model on this rank's micro-batch; tensors are moved to the device."""
        self._require_open()
        if self.parameters_store.gathering:
            raise PolyscaleError(
                "A forward inside parameters_store.gathered()",
                why="the model holds whole copies there, which have no part in training",
                fix="Leave the context first, or use the tensors it yields",
            )
        self._guard.require_whole("A forward")
        self._guard.recover()
        with self._guard.doing("forward"):
            return self._forward(args, kwargs)

    def _forward(self, args: Any, kwargs: Any) -> Any:
        if self.device.type != "cpu":
            args, kwargs = to_device((args, kwargs), self.device)
        if torch.is_inference_mode_enabled():
            # Whole parameters gathered in inference mode could not be used for training afterwards.
            with torch.inference_mode(False), torch.no_grad():
                return self.module(*args, **kwargs)
        return self.module(*args, **kwargs)

    def backward(self, loss: torch.Tensor, weight: float | None = None) -> None:
        """Add the gradients of ``loss`` to the accumulation.

        Args:
            loss: a scalar: the mean over this micro-batch; with ``weight``, the sum over its items.
            weight: number of items that ``loss`` sums over (tokens, for example). The update then divides by the
                items of all backwards, micro-steps and ranks.

        Raises:
            PolyscaleError: the loss is not a scalar with a graph, or weighted and unweighted backwards are mixed.
        """
        self._require_open()
        self._guard.require_sound("backward")
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            shape = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise PolyscaleError(f"backward of {shape}", why="a loss is one number", fix="Pass loss.mean()")
        if not loss.requires_grad:
            raise PolyscaleError(
                "backward of a loss without a graph",
                why="no trained parameter contributed to it, or it was detached or computed under no_grad",
                fix="Compute it from the engine's output while gradients are recorded",
            )
        if self.optimizer is None:
            raise PolyscaleError(
                "backward without an optimizer",
                why="the engine was made to evaluate only",
                fix="Add 'optimizer' to the configuration or pass one to polyscale.initialize",
            )
        accumulation = self._accumulation
        accumulation.add_backward(loss, weight)
        gradients = self._setup.applied.gradients
        with self._guard.doing("backward"):
            gradients.before_backward(last=accumulation.last, hold=self._hold)
            scale = self.loss_scale
            torch.autograd.backward(loss if scale == 1.0 else loss.float() * scale)
            gradients.after_backward()

    def step(self) -> bool:
        """End the micro-step; update when it was the last of ``gradient_accumulation_steps``.

        Returns:
            Whether the parameters were updated. False between updates, and for an update skipped for an overflow.
        """
        self._require_open()
        self._guard.require_sound("step()")
        self._accumulation.end_micro_step()
        self.micro_steps += 1
        if self._accumulation.done < self._accumulation.wanted:
            return False
        return self._update()

    def flush(self) -> bool:
        """Update with the micro-steps done so far, averaged over those; False when there are none."""
        self._require_open()
        self._guard.require_sound("flush()")
        agree_on_flush(self._setup.control, self._accumulation)
        if not self._accumulation.open:
            return False
        if self._accumulation.backwards:
            self._accumulation.end_micro_step()
            self.micro_steps += 1
        return self._update()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside do not communicate; what they leave is reduced before the update, at any stage."""
        self._require_open()
        before, self._hold = self._hold, True
        try:
            yield
        finally:
            self._hold = before

    def train_batch(self, iterator: Iterator[Any] | None = None) -> torch.Tensor:
        """Run one whole accumulation from ``iterator`` (default: ``data``) and update.

        Returns:
            The mean loss over micro-batches and ranks (0-dim tensor).

        Raises:
            StopIteration: the iterator was already at its end.
            PolyscaleError: it ended in the middle; what came is kept for ``flush()``.
        """
        self._require_open()
        self._guard.recover()
        self._accumulation.require_closed("train_batch()")
        return self._batches.train(iterator)

    def eval_batch(self, iterator: Iterator[Any] | None = None) -> torch.Tensor:
        """Mean loss over as many micro-batches as ``train_batch`` takes, and over ranks, in evaluation mode."""
        self._require_open()
        return self._batches.evaluate(iterator)

    def train(self, mode: bool = True) -> Engine:
        """Put the model in training mode (or evaluation mode)."""
        self.module.train(mode)
        return self

    def eval(self) -> Engine:
        """Put the model in evaluation mode."""
        return self.train(False)

    # What is known.

    @property
    def grad_norm(self) -> float | None:
        """Norm of the averaged, unscaled gradient of the last update, before clipping; None before the first."""
        return None if self._numbers is None else float(self._numbers.norm)

    @property
    def clip_factor(self) -> float:
        """What clipping multiplied the gradient of the last update by."""
        return 1.0 if self._numbers is None else float(self._numbers.clip_factor)

    @property
    def loss_scale(self) -> float:
        """The factor on the loss (fp16); 1.0 elsewhere."""
        return self._stepper.loss_scale

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-steps per update."""
        return self._accumulation.wanted

    def dtypes(self) -> dict[str, str]:
        """Dtypes by role: parameter, gradient, accumulation, reduction, master ("fp32", "bf16", ...)."""
        return dict(self._setup.dtypes)

    def learning_rates(self) -> tuple[float, ...]:
        """Learning rate of each group, as the coming update uses it."""
        return self._stepper.rates()

    def memory(self) -> MemoryUse:
        """Bytes in use on this rank's device (on cpu: by this process): allocated, reserved, peak, total."""
        self._require_open()
        accelerator = self._setup.accelerator
        return keep_claim(accelerator.name, "memory statistics", "asking for them", accelerator.memory)

    # Checkpoints.

    def track(self, name: str, obj: Any) -> None:
        """Save and restore ``obj`` (anything with state_dict and load_state_dict) with every checkpoint."""
        for method in ("state_dict", "load_state_dict"):
            if not callable(getattr(obj, method, None)):
                raise PolyscaleError(
                    f"track({name!r}, {type(obj).__name__})", why=f"it has no {method}()", fix=f"Give it a {method}()"
                )
        if self._tracked.get(name, obj) is not obj:
            raise PolyscaleError(f"track({name!r})", why="another object has that name", fix="Choose another name")
        self._tracked[name] = obj

    def save(
        self,
        path: str | os.PathLike[str],
        tag: str | None = None,
        *,
        overwrite: bool = False,
        client_state: Any = None,
    ) -> str:
        """Write a checkpoint that any world size and stage can load. Collective.

        Args:
            path: directory of checkpoints, on a file system that all ranks share.
            tag: name of this one (default ``step-<steps>``).
            overwrite: replace an existing tag; it stays loadable until the new one is complete.
            client_state: anything of tensors, numbers, strings, lists and dicts; ``load`` gives it back.

        Returns:
            The tag.

        Raises:
            PolyscaleError: an accumulation is open, the tag exists, ranks disagree, or there is no space; an earlier
                checkpoint is then untouched.
        """
        from polyscale.engine.saving import save

        self._require_open()
        _require_path("save", path)
        tag = tag or f"step-{self.steps}"
        self._guard.require_whole(f"save of {tag!r}")
        self._guard.recover()
        self._accumulation.require_closed(f"save({str(path)!r}, tag={tag!r})")
        with self._guard.doing(f"save of {tag!r}", step=False):
            return save(self, self._setup, path, tag, overwrite=overwrite, client_state=client_state)

    def load(self, path: str | os.PathLike[str], tag: str | None = None) -> LoadReport:
        """Restore a checkpoint (default: the latest) saved at any world size and stage. Collective.

        Returns:
            What was restored, what was absent from the checkpoint, what was ignored, and the client state.

        Raises:
            CheckpointError: it is missing, half-written, cut short, of a newer format, or of another model: nothing was
                changed. Or a file is damaged inside its length, or a tracked object does not take its state: the error
                says what was restored before; load again before training goes on.
        """
        from polyscale.engine.loading import load

        self._require_open()
        _require_path("load", path)
        self._guard.recover()
        self._accumulation.require_closed(f"load({str(path)!r})")
        with self._guard.doing(f"load of {tag or 'the latest checkpoint'}", step=False):
            report = load(self, self._setup, path, tag)
        self._numbers = None  # they were of an update before the load
        if {"parameters", "optimizer"} <= set(report.restored) or self.optimizer is None:
            self._stepper.torn = False
        self._setup.watchdog.stepped(self.steps)
        return report

    def export(self, path: str | os.PathLike[str], *, max_shard_bytes: int = 5 * 2**30) -> list[str]:
        """Write the weights and persistent buffers as safetensors, one whole tensor in memory at a time. Collective.

        Args:
            path: a ``.safetensors`` file, or a directory (files that transformers loads).
            max_shard_bytes: larger models are split into several files with an index.

        Returns:
            The files written. Keys are those of the model's ``state_dict()``, parameters are in the masters' dtype.
        """
        from polyscale.engine.exporting import export

        self._require_open()
        _require_path("export", path)
        self._guard.require_whole("export")
        with self._guard.doing("export", step=False):
            return export(self, self._setup, path, max_shard_bytes=max_shard_bytes)

    # End.

    def close(self) -> None:
        """Free what the engine made: hooks, buffers, its control and checkpoint groups, threads. May be called twice.

        Raises:
            PolyscaleError: an accumulation is open (a warning when an exception is on its way).
        """
        if self._closed:
            return
        self._guard.recover(alone=True)
        if self._accumulation.open:
            error = self._accumulation.open_error("close()")
            if sys.exc_info()[0] is None:
                raise error
            log.warning("%s", error)
        self._release()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: Any, value: Any, trace: Any) -> None:
        if kind is not None and self._accumulation.open and not self._closed:
            log.warning("%s", self._accumulation.open_error("close()"))
            self._accumulation.reset()
        self.close()

    def _release(self) -> None:
        self._closed = True
        with self._setup.watchdog.phase("close"):
            self._setup.observers.tell(EngineClosed(self.steps))
            self._setup.close()
        # The store would keep the optimizer, and with it memory of the device, in a cycle.
        self.parameters_store.before_gradients = lambda: None
        self._tracked.clear()
        self._numbers = None
        self._accumulation.reset()
        for name in (
            "module",
            "optimizer",
            "lr_scheduler",
            "data",
            "_guard",
            "_stepper",
            "_batches",
            "_setup",
        ):
            vars(self)[name] = None
        vars(self)["parameters_store"] = _Closed()

    def _require_open(self) -> None:
        if self._closed:
            raise _closed("A call")

    # Inside.

    def _update(self) -> bool:
        setup = self._setup
        with self._guard.doing("step"):
            outcome = self._stepper.update(self._accumulation)
        self._numbers = outcome.numbers
        self.samples += setup.batch.micro * outcome.micro_steps * self.topology.dp_size
        self.steps += not outcome.skipped
        self.skipped += outcome.skipped
        setup.watchdog.stepped(self.steps)
        if setup.observers or is_printed(setup, self.steps):
            with self._guard.doing("report of a step", step=False, timed=False):
                tell_step(setup, self._event(outcome))
        return not outcome.skipped

    def _event(self, outcome: Outcome) -> StepTaken:
        seconds, self._guard.seconds = self._guard.seconds, {}
        return StepTaken(
            step=self.steps,
            samples=self.samples,
            loss=None if outcome.loss is None else float(outcome.loss),
            lr=outcome.rates,
            grad_norm=self.grad_norm,
            clip_factor=self.clip_factor,
            loss_scale=outcome.loss_scale,
            skipped=outcome.skipped,
            seconds=seconds,
        )


class _Closed:
    """What stands for the store of an engine that was closed."""

    def __getattr__(self, name: str) -> Any:
        raise _closed(f"parameters_store.{name}")


def _closed(what: str) -> PolyscaleError:
    why = "close() has freed its hooks and groups"
    return PolyscaleError(f"{what} of a closed engine", why=why, fix="Make a new one")


def _require_path(call: str, path: Any) -> None:
    if not isinstance(path, (str, os.PathLike)):
        raise PolyscaleError(f"{call}({path!r:.80})", why=f"{type(path).__name__} is no path", fix="Give a path")
