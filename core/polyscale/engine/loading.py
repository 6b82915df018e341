"""Reads a checkpoint saved at any world size and stage. What does not fit is found before anything is changed."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyscale.checkpoint.blobs import load_blob
from polyscale.checkpoint.compare import compare_parameters
from polyscale.checkpoint.directory import CheckpointDirectory
from polyscale.checkpoint.manifest import Manifest, read_manifest
from polyscale.checkpoint.names import TENSORS, Hidden
from polyscale.checkpoint.report import LoadReport
from polyscale.engine.saving import CLIENT, rank_file
from polyscale.engine.setup import Setup
from polyscale.engine.state import (
    model_tensors,
    optimizer_tensors,
    prepare_optimizer,
    restore_own_buffers,
    restore_random_state,
    unmatched_groups,
)
from polyscale.engine.together import together
from polyscale.errors import CheckpointError
from polyscale.interfaces.checkpoint import LogicalTensor, StoredTensor

if TYPE_CHECKING:
    from polyscale.engine.engine import Engine


@dataclass
class _Outcome:
    restored: list[str] = field(default_factory=list)
    absent: list[str] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)


def load(engine: Engine, setup: Setup, path: str | os.PathLike[str], tag: str | None) -> LoadReport:
    """See ``Engine.load``."""
    control, what = setup.control, f"load of {tag or 'the latest checkpoint'}"
    control.agree("load", {"path": str(Path(path).absolute()), "tag": tag}, what=what)
    rank = setup.topology.rank
    found = together(
        control, "load-resolve", lambda: str(CheckpointDirectory(path).resolve(tag)) if rank == 0 else None, what=what
    )
    directory = Path(control.decide("load-directory", found, what=what))
    storage = setup.checkpoint_storage()

    def inspect() -> tuple[Manifest, dict[str, str], dict[str, StoredTensor], dict[str, Any]]:
        manifest = read_manifest(directory)
        sources = compare_parameters(manifest, setup.applied.store.infos)
        contents = storage.contents(directory / TENSORS)
        _require_tensors(manifest, contents, directory)
        own = directory / rank_file(rank)
        blob = load_blob(own if own.exists() else directory / rank_file(0))
        return manifest, sources, contents, blob

    manifest, sources, contents, blob = together(control, "load-inspect", inspect, what=what)
    outcome = _Outcome()
    tensors = _parameters_and_buffers(setup, sources, contents, outcome)
    undo = _take_optimizer(setup, manifest, outcome)
    if undo is not None:
        tensors.update(_rename(optimizer_tensors(setup), sources))
    group = setup.topology.group("checkpoint") if setup.topology.world_size > 1 else None
    try:
        storage.read(directory / TENSORS, tensors, group)
    except BaseException:
        if undo is not None:
            undo()
        raise
    setup.applied.store.written()
    _restore_values(engine, setup, manifest, outcome)
    _restore_tracked(engine, blob.get("tracked", {}), outcome)
    _restore_rank(setup, manifest, blob, outcome)
    client = load_blob(directory / CLIENT) if manifest.has.get("client_state") else None
    return LoadReport(
        tuple(outcome.restored), tuple(outcome.absent), tuple(outcome.ignored), _tag(directory), engine.steps, client
    )


def _tag(directory: Path) -> str:
    """The tag of a checkpoint, also of one that an interrupted overwrite left aside."""
    hidden = Hidden.parse(directory.name)
    return directory.name if hidden is None else hidden.tag


def _require_tensors(manifest: Manifest, contents: Mapping[str, StoredTensor], directory: Path) -> None:
    lost = [name for name in manifest.tensors if name not in contents]
    if lost:
        raise CheckpointError(
            f"{directory} lacks {len(lost)} tensors ({', '.join(lost[:5])})",
            why="its manifest lists them",
            fix="The directory was changed or damaged: load another checkpoint",
        )


def _rename(tensors: dict[str, LogicalTensor], sources: Mapping[str, str]) -> dict[str, LogicalTensor]:
    """Key tensors by the name under which the checkpoint holds their parameter."""
    renamed = {}
    for name, tensor in tensors.items():
        prefix, _, fqn = name.rpartition("/")
        renamed[f"{prefix}/{sources.get(fqn, fqn)}"] = tensor
    return renamed


def _parameters_and_buffers(
    setup: Setup, sources: Mapping[str, str], contents: Mapping[str, StoredTensor], outcome: _Outcome
) -> dict[str, LogicalTensor]:
    own = model_tensors(setup)
    parameters = _rename({name: t for name, t in own.items() if name.startswith("parameter/")}, sources)
    buffers = {name: tensor for name, tensor in own.items() if name.startswith("buffer/")}
    outcome.restored.append("parameters")
    chosen = dict(parameters)
    for name, tensor in buffers.items():
        stored = contents.get(name)
        if stored is None:
            outcome.absent.append(name.replace("/", " ", 1))
        elif stored.shape != tensor.shape:
            raise CheckpointError(
                f"{name.replace('/', ' ', 1)} is {list(stored.shape)} instead of {list(tensor.shape)}",
                why="the checkpoint is of another model",
                fix="Build the model that was saved",
            )
        else:
            chosen[name] = tensor
    extra = [name for name in contents if name.startswith("buffer/") and name not in buffers]
    outcome.ignored.extend(name.replace("/", " ", 1) for name in extra)
    if buffers and len(chosen) > len(parameters):
        outcome.restored.append("buffers")
    return chosen


def _take_optimizer(setup: Setup, manifest: Manifest, outcome: _Outcome) -> Callable[[], None] | None:
    """Prepare the optimizer to receive the saved states; return what undoes it, or None when nothing fits."""
    saved, optimizer = manifest.optimizer, setup.optimizer
    if optimizer is None:
        if saved is not None:
            outcome.ignored.append("optimizer")
        return None
    if saved is None:
        outcome.absent.append("optimizer")
        return None
    own = type(optimizer).__name__
    if saved["class"] != own:
        outcome.ignored.append(f"optimizer (of {saved['class']}, this engine has {own})")
        outcome.absent.append("optimizer")
        return None
    outcome.absent.extend(unmatched_groups(setup, saved))
    undo = prepare_optimizer(setup, saved)
    outcome.restored.append("optimizer")
    return undo


def _restore_values(engine: Engine, setup: Setup, manifest: Manifest, outcome: _Outcome) -> None:
    for name, target in (("scheduler", engine.lr_scheduler), ("scaler", setup.scaler)):
        state = getattr(manifest, name)
        if target is not None and state is not None:
            target.load_state_dict(state)
            outcome.restored.append(name)
        elif target is not None:
            outcome.absent.append(name)
        elif state is not None:
            outcome.ignored.append(name)
    for name in ("steps", "skipped", "micro_steps", "samples"):
        setattr(engine, name, int(manifest.counters.get(name, 0)))
    outcome.restored.append("counters")


def _restore_tracked(engine: Engine, states: Mapping[str, Any], outcome: _Outcome) -> None:
    for name, tracked in engine._tracked.items():
        if name in states:
            tracked.load_state_dict(states[name])
            outcome.restored.append(name)
        else:
            outcome.absent.append(name)
    outcome.ignored.extend(name for name in states if name not in engine._tracked)


def _restore_rank(setup: Setup, manifest: Manifest, blob: Mapping[str, Any], outcome: _Outcome) -> None:
    if manifest.world_size != setup.topology.world_size:
        outcome.absent.append(f"rng (saved by {manifest.world_size} ranks, here are {setup.topology.world_size})")
        return
    restore_random_state(setup, blob["rng"])
    restore_own_buffers(setup, blob.get("buffers", {}))
    outcome.restored.append("rng")
