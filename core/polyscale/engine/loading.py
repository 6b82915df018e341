"""Reads a checkpoint saved at any world size and stage. What does not fit is found before anything is changed.

In order, on all ranks: (1) agree on path and tag; (2) rank 0 finds the directory; (3) read all small files, compare,
and hand over what can be taken back: hyper-parameters, schedule, loss scaler, position in the data; (4) read the
tensors, which begins with a check of every file; (5) objects of the user, and random numbers last. A failure before the
tensors' data is read undoes (3) on every rank. One of a user's object in (5) cannot be undone, and says what is done.
"""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyscale.checkpoint.compare import compare_parameters
from polyscale.checkpoint.faults import cause
from polyscale.checkpoint.finding import CheckpointFinder
from polyscale.checkpoint.names import TENSORS, Hidden
from polyscale.checkpoint.report import LoadReport
from polyscale.data import Loader
from polyscale.engine.checkpoint_files import Files, read_files
from polyscale.engine.optimizer_state import optimizer_tensors, prepare_optimizer, unmatched
from polyscale.engine.setup import Setup
from polyscale.engine.state import kind_of, model_tensors, restore_own_buffers, restore_random_state
from polyscale.engine.together import on_first, together
from polyscale.errors import CheckpointError, PolyscaleError
from polyscale.interfaces.checkpoint import LogicalTensor, StoredTensor

if TYPE_CHECKING:
    from polyscale.engine.engine import Engine

_COUNTERS = ("steps", "skipped", "micro_steps", "samples")


@dataclass
class _Outcome:
    """What the report will say."""

    restored: list[str] = field(default_factory=list)
    absent: list[str] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)


def load(engine: Engine, setup: Setup, path: str | os.PathLike[str], tag: str | None) -> LoadReport:
    """See ``Engine.load``."""
    control, what = setup.control, f"load of {tag or 'the latest checkpoint'}"
    asked = {"path": str(Path(path).absolute()), "tag": None if tag is None else str(tag)}
    control.agree("load", asked, what=what)
    found = on_first(control, "load-resolve", lambda: str(CheckpointFinder(path).resolve(tag)), what=what)
    directory, outcome = Path(found), _Outcome()
    group = setup.topology.group("checkpoint") if setup.topology.world_size > 1 else None
    with ExitStack() as undo:

        def prepare() -> tuple[Files, dict[str, LogicalTensor]]:
            files = read_files(setup, directory)
            return files, _prepare(engine, setup, files, outcome, undo)

        files, tensors = together(control, "load-prepare", prepare, what=what)
        setup.checkpoint_storage().read(directory / TENSORS, tensors, group)
        undo.pop_all()
    setup.applied.store.written()
    for name in _COUNTERS:
        setattr(engine, name, files.manifest.counters.get(name, 0))
    together(control, "load-finish", lambda: _finish(engine, setup, files, outcome), what=what)
    parts = (tuple(outcome.restored), tuple(outcome.absent), tuple(outcome.ignored))
    return LoadReport(*parts, _tag(directory), engine.steps, files.client_state)


def _tag(directory: Path) -> str:
    """The tag of a checkpoint, also of one that an interrupted overwrite left aside."""
    hidden = Hidden.parse(directory.name)
    return directory.name if hidden is None else hidden.tag


def _prepare(
    engine: Engine, setup: Setup, files: Files, outcome: _Outcome, undo: ExitStack
) -> dict[str, LogicalTensor]:
    """Compare, and change what can be put back; return the tensors to read, by their names in the checkpoint."""
    names = compare_parameters(files.manifest, setup.applied.store.infos)
    tensors = _parameters_and_buffers(setup, names, files.contents, outcome)
    outcome.restored.append("counters")
    tensors.update(_optimizer(engine, setup, files, names, outcome, undo))
    for name, part in (("scheduler", engine.lr_scheduler), ("scaler", setup.scaler)):
        state = getattr(files.manifest, name)
        if part is None:
            outcome.ignored.extend([name] if state is not None else [])
        elif state is None:
            outcome.absent.append(name)
        elif _fits(name, part, files):
            _hand_over(name, part, state, undo)
            outcome.restored.append(name)
        else:
            saved, own = files.manifest.classes[name], kind_of(part, part.state_dict())
            outcome.ignored.append(f"{name} (of {saved}, this engine has {own})")
            outcome.absent.append(name)
    for name, loader in engine._tracked.items():
        if isinstance(loader, Loader) and name in files.tracked:
            _hand_over(name, loader, files.tracked[name], undo)
            outcome.restored.append(name)
    return tensors


def _fits(name: str, part: Any, files: Files) -> bool:
    """Whether the saved state is of this kind of scheduler or loss scaler."""
    own = kind_of(part, part.state_dict())
    return getattr(files.manifest, name) is not None and files.manifest.classes.get(name, own) == own


def _hand_over(name: str, part: Any, state: Any, undo: ExitStack) -> None:
    """Restore a part whose state is small, so that it can be taken back."""
    before = copy.deepcopy(part.state_dict())

    def put_back() -> None:
        with contextlib.suppress(Exception):  # the error that is on its way says more
            part.load_state_dict(before)

    undo.callback(put_back)
    _give(f"The {name}", part, state, "Nothing was changed; load another checkpoint")


def _give(given: str, part: Any, state: Any, fix: str) -> None:
    try:
        part.load_state_dict(state)
    except PolyscaleError as error:
        raise CheckpointError(error.given, why=error.why, fix=". ".join(filter(None, (error.fix, fix)))) from error
    except Exception as error:
        raise CheckpointError(f"{given} does not take its saved state", why=cause(error), fix=fix) from error


def _parameters_and_buffers(
    setup: Setup, names: Mapping[str, str], contents: Mapping[str, StoredTensor], outcome: _Outcome
) -> dict[str, LogicalTensor]:
    own = model_tensors(setup, names)
    chosen: dict[str, LogicalTensor] = {}
    for name, tensor in own.items():
        stored, words = contents.get(name), name.replace("/", " ", 1)
        if stored is None and name.startswith("buffer/"):
            outcome.absent.append(words)
            continue
        if stored is not None and stored.shape != tensor.shape:
            raise CheckpointError(
                f"{words} is {list(stored.shape)} instead of {list(tensor.shape)}",
                why="the checkpoint is of another model",
                fix="Build the model that was saved",
            )
        chosen[name] = tensor
    extra = [name for name in contents if name.startswith("buffer/") and name not in own]
    outcome.ignored.extend(name.replace("/", " ", 1) for name in extra)
    outcome.restored.append("parameters")
    if any(name.startswith("buffer/") for name in chosen):
        outcome.restored.append("buffers")
    return chosen


def _optimizer(
    engine: Engine, setup: Setup, files: Files, names: Mapping[str, str], outcome: _Outcome, undo: ExitStack
) -> dict[str, LogicalTensor]:
    """Prepare the optimizer to receive the saved states; return those that are tensors."""
    saved, optimizer = files.manifest.optimizer, setup.optimizer
    if optimizer is None:
        outcome.ignored.extend(["optimizer"] if saved is not None else [])
        return {}
    if saved is None:
        outcome.absent.append("optimizer")
        return {}
    own = type(optimizer).__name__
    if saved["class"] != own:
        outcome.ignored.append(f"optimizer (of {saved['class']}, this engine has {own})")
        outcome.absent.append("optimizer")
        return {}
    absent, ignored = unmatched(setup, saved, names)
    outcome.absent.extend(absent)
    outcome.ignored.extend(ignored)
    scheduler = engine.lr_scheduler
    left = scheduler is not None and not _fits("scheduler", scheduler, files)
    # A schedule that is left as it was goes on from the learning rates that it has set.
    prepare_optimizer(setup, saved, names, undo, keep=("lr", "initial_lr") if left else ())
    outcome.restored.append("optimizer")
    return optimizer_tensors(setup, {fqn: name for fqn, name in names.items() if name in saved["states"]})


def _finish(engine: Engine, setup: Setup, files: Files, outcome: _Outcome) -> None:
    """Restore what cannot be put back: objects of the user, which may draw random numbers, and then those."""
    if files.same_world:
        restore_own_buffers(setup, files.buffers)
    saved, here, rank = files.manifest.world_size, setup.topology.world_size, setup.topology.rank
    for name, tracked in engine._tracked.items():
        if name not in files.tracked:
            outcome.absent.append(name)
        elif not isinstance(tracked, Loader):
            done = f"Restored before it: {', '.join(outcome.restored)}. Load again before training goes on"
            _give(f"Tracked object {name!r}", tracked, files.tracked[name], done)
            outcome.restored.append(name if rank < saved else f"{name} (that of rank 0)")
            outcome.ignored.extend(f"{name} of rank {gone}" for gone in range(here, saved))
    outcome.ignored.extend(name for name in files.tracked if name not in engine._tracked)
    if not files.same_world:
        outcome.absent.append(f"rng (saved by {saved} ranks, here are {here})")
        return
    left = restore_random_state(setup, files.rng)
    outcome.restored.append("rng")
    if left:
        outcome.absent.append(f"rng of the device ({left})")
