"""Out of memory, told so that it can be acted upon: what was asked for, who holds the memory, what to change.

Notable: backends say it in many ways (torch's own class, a RuntimeError with words, Python's MemoryError), and a
collective wraps it in an error of its own. Whatever it was, an engine raises one class, which is also torch's, so that
handlers of either catch it. The frames that the exception has passed are cleared: their local variables are the
activations of the failed forward, which would fill the device as long as somebody holds the exception.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from polyscale import errors
from polyscale.engine import holders
from polyscale.engine.holders import Holder, MemoryReport, in_words

if TYPE_CHECKING:
    from polyscale.config import Config
    from polyscale.engine.runtime import Runtime
    from polyscale.engine.setup import Setup
    from polyscale.interfaces.accelerator import Accelerator

_WORDS = (
    "out of memory",
    "not enough memory",
    "can't allocate memory",
    "cannot allocate memory",
    "failed to allocate",
    "alloc_failed",
)
_HOST_WORDS = ("defaultcpuallocator", "not enough memory: you tried to allocate")
_REQUEST = re.compile(r"(?:tried to allocate|requested|allocating|allocate)\s+([\d.]+)\s*([KMGT]i?B|bytes?)?", re.I)
_UNITS = {"": 1, "b": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
_TRAINING = ("forward", "loss", "backward", "step")


class OutOfMemory(errors.OutOfMemoryError, torch.OutOfMemoryError):
    """What an engine raises when memory runs out: polyscale's error and torch's."""


def found_in(error: BaseException) -> BaseException | None:
    """The out-of-memory error that ``error`` is, or was explicitly raised from; None: it is about something else.

    Only what backends and polyscale raise is looked into: an exception of another class says what its author meant.
    """
    link: BaseException | None = error
    while link is not None:
        if isinstance(link, (torch.OutOfMemoryError, MemoryError)):
            return link
        if isinstance(link, RuntimeError) and any(word in str(link).lower() for word in _WORDS):
            return link
        if not isinstance(link, (RuntimeError, errors.PolyscaleError)):
            return None
        link = link.__cause__
    return None


def of_engine(setup: Setup, error: BaseException, phase: str, *, torn: bool = False) -> OutOfMemory:
    """Explain an out-of-memory error of an engine's work.

    Args:
        setup: the engine's parts.
        error: one in which ``found_in`` finds something.
        phase: what the engine was doing, in the words of a message.
        torn: whether an update was interrupted in the middle.
    """
    report = _measure(setup.accelerator, error, phase, lambda: holders.of_engine(setup))
    fix = "; ".join(_advice(setup, report, phase))
    if not torn:
        return _made(report, error, setup.topology.rank, fix)
    why = "The update was interrupted in the middle: some weights are new, others old"
    return _made(report, error, setup.topology.rank, f"Load a checkpoint before training goes on; then: {fix}", why)


def of_start(runtime: Runtime, model: nn.Module, error: BaseException) -> OutOfMemory:
    """Explain an out-of-memory error of ``initialize``, before there is an engine."""
    report = _measure(runtime.accelerator, error, "initialize", lambda: holders.of_model(model))
    stage = runtime.config.zero_optimization.stage
    advice = ["Build the model again under polyscale.partitioned_init(), which never holds it whole"]
    if stage == 0 and runtime.control.world_size > 1:
        advice.append("take zero_optimization.stage 3 (now 0), which gives each rank its share of the parameters")
    return _made(report, error, runtime.control.rank, "; ".join(advice))


def let_go(error: BaseException) -> None:
    """Clear the local variables of the frames that ``error``, and what it was raised from, have passed."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        traceback.clear_frames(link.__traceback__)
        link = link.__cause__ or link.__context__


def requested(text: str) -> int | None:
    """How many bytes were asked for, as far as a backend's message tells."""
    found = _REQUEST.search(text)
    if found is None:
        return None
    try:
        return int(float(found[1]) * _UNITS[(found[2] or "b")[0].lower()])
    except ValueError:
        return None


def _measure(accelerator: Accelerator, error: BaseException, phase: str, tensors: Any) -> MemoryReport:
    error = found_in(error) or error
    text = str(error)
    host = isinstance(error, MemoryError) or any(word in text.lower() for word in _HOST_WORDS)
    device = accelerator.device()
    on_host = host and device.type != "cpu"
    allocated = peak = total = None
    named: list[Holder] = []
    if not on_host:
        try:
            use = accelerator.memory()
            allocated, peak, total = use.allocated, use.peak, use.total
        except Exception:  # a device that does not count, or that has just died
            pass
        named = _count(tensors, device)
    if allocated is not None:
        rest = allocated - sum(holder.bytes for holder in named)
        counted = accelerator.capabilities.memory_statistics
        if rest > 0:
            named.append(Holder("activations and temporary memory" if counted else "the rest of the process", rest))
    where = "host" if on_host else str(device)
    return MemoryReport(where, phase, requested(text), allocated, peak, total, tuple(named))


def _count(tensors: Any, device: torch.device) -> list[Holder]:
    def until_failure() -> Iterator[holders.Named]:
        given: Iterable[holders.Named] = tensors()
        yield from given

    try:
        return holders.count(until_failure(), device)
    except Exception:  # a half-made engine: what can be said is said
        return []


def _made(report: MemoryReport, error: BaseException, rank: int, fix: str, first: str = "") -> OutOfMemory:
    asked = "" if report.requested is None else f", where {in_words(report.requested)} more were asked for"
    why = [first] if first else []
    if report.allocated is not None:
        of = f" of {in_words(report.total)}" if report.total else ""
        why.append(f"{in_words(report.allocated)}{of} are in use, the peak was {in_words(report.peak or 0)}")
    if report.holders:
        why.append(f"Held by {'; '.join(map(str, report.holders))}")
    why.append(f"The backend says: {_line(error)}")
    made = OutOfMemory(
        f"Out of memory on {report.device} (rank {rank}) in {report.phase}{asked}", why=". ".join(why), fix=fix
    )
    made.report = report
    return made


def _advice(setup: Setup, report: MemoryReport, phase: str) -> Iterator[str]:
    """What would help here, the cheapest first."""
    config, batch, world = setup.config, setup.batch, setup.topology.dp_size
    stage = config.zero_optimization.stage
    if phase.startswith(_TRAINING):
        if batch.micro > 1:
            half = (batch.micro + 1) // 2
            yield (
                f"Take smaller micro-batches and more of them: train_micro_batch_size_per_gpu {batch.micro} -> {half}, "
                f"gradient_accumulation_steps {batch.accumulation} -> {batch.accumulation * 2}"
            )
        if not phase.startswith("step") and not _recomputes(setup.model):
            yield "recompute activations in backward (torch.utils.checkpoint, or the model's own switch for it)"
        if not phase.startswith("step") and _can_narrow(config, setup):
            yield 'compute in 16 bits ("bf16": {"enabled": true})'
    if world > 1 and stage < 3:
        yield f"shard more: zero_optimization.stage {stage} -> {3 if stage else 2}"
    if stage:
        yield f"spread it over more than {world} rank{'s' if world > 1 else ''}"
    elif world == 1:
        yield "start more ranks, with zero_optimization.stage 1 to 3"
    if report.device != "host" and phase.startswith(("save", "load", "export")):
        yield "free tensors of your own first"


def _recomputes(model: nn.Module) -> bool:
    return any(getattr(module, "gradient_checkpointing", False) is True for module in model.modules())


def _can_narrow(config: Config, setup: Setup) -> bool:
    return config.precision == "fp32" and "bf16" in setup.accelerator.capabilities.dtypes


def _line(error: BaseException) -> str:
    error = found_in(error) or error
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__).rstrip(".")
