"""Writes a checkpoint: agree, write beside, rename. An earlier checkpoint stands until the new one is complete.

In order, on all ranks: (1) agree on path and tag, so a rank that does not save is named after a time-out; (2) take the
state and refuse what could not be loaded again, before anything is written; (3) rank 0 makes a temporary directory;
(4) all write their boxes of tensors, then their own file; (5) rank 0 writes the manifest and renames.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyscale.checkpoint.blobs import check_blob, save_blob
from polyscale.checkpoint.directory import CheckpointDirectory
from polyscale.checkpoint.manifest import Manifest, encode_manifest, parameter_entries, write_manifest
from polyscale.checkpoint.names import TENSORS, check_tag
from polyscale.engine.optimizer_state import optimizer_tensors, optimizer_values
from polyscale.engine.setup import Setup
from polyscale.engine.state import kind_of, model_tensors, own_buffers, random_state
from polyscale.engine.together import on_first, together
from polyscale.interfaces.checkpoint import LogicalTensor
from polyscale.interfaces.observer import CheckpointSaved

if TYPE_CHECKING:
    from polyscale.engine.engine import Engine

CLIENT = "client_state.pt"


@dataclass(frozen=True)
class _State:
    """What this rank writes: views of its tensors, and its own file; on rank 0 the manifest counts."""

    tensors: dict[str, LogicalTensor]
    own: dict[str, Any]
    manifest: Manifest


def rank_file(rank: int) -> str:
    """Name of the file of one rank: its random numbers and tracked objects."""
    return f"rank-{rank}.pt"


def save(
    engine: Engine, setup: Setup, path: str | os.PathLike[str], tag: str, *, overwrite: bool, client_state: Any
) -> str:
    """See ``Engine.save``."""
    started = time.perf_counter()
    control, what = setup.control, f"save of {tag!r}"
    directory = CheckpointDirectory(path)
    control.agree("save", {"path": str(Path(path).absolute()), "tag": str(tag), "overwrite": overwrite}, what=what)
    state = together(control, "save-state", lambda: _take(engine, setup, tag, client_state), what=what)
    group = setup.topology.group("checkpoint") if setup.topology.world_size > 1 else None
    begun = on_first(control, "save-begin", lambda: str(directory.begin(tag, overwrite=overwrite)), what=what)
    temporary = Path(begun)
    own_file = temporary / rank_file(setup.topology.rank)
    try:
        setup.checkpoint_storage().write(temporary / TENSORS, state.tensors, group)
        together(control, "save-rank", lambda: save_blob(own_file, state.own), what=what)

        def commit() -> None:
            if client_state is not None:
                save_blob(temporary / CLIENT, client_state, name="client_state")
            write_manifest(temporary, state.manifest)
            directory.commit(temporary, tag, overwrite)

        on_first(control, "save-commit", commit, what=what)
    except BaseException:
        if setup.topology.rank == 0:
            directory.abort(temporary)
        raise
    setup.observers.tell(CheckpointSaved(str(directory.path(tag)), engine.steps, time.perf_counter() - started))
    return tag


def _take(engine: Engine, setup: Setup, tag: str, client_state: Any) -> _State:
    """Take this rank's state, and refuse what cannot be written or loaded again. Not collective."""
    check_tag(tag)
    check_blob(client_state, "client_state")
    setup.checkpoint_storage()
    own = {
        "tracked": {name: tracked.state_dict() for name, tracked in engine._tracked.items()},
        "rng": random_state(setup),
        "buffers": own_buffers(setup),
    }
    check_blob(own["tracked"], "tracked")
    tensors = {**model_tensors(setup), **optimizer_tensors(setup)}
    manifest = _manifest(engine, setup, tuple(tensors), client_state)
    encode_manifest(manifest)
    return _State(tensors, own, manifest)


def _manifest(engine: Engine, setup: Setup, tensors: tuple[str, ...], client_state: Any) -> Manifest:
    parts = {"scheduler": engine.lr_scheduler, "scaler": setup.scaler}
    states = {name: part.state_dict() for name, part in parts.items() if part is not None}
    return Manifest(
        world_size=setup.topology.world_size,
        stage=setup.config.zero_optimization.stage,
        data_parallel=setup.data_parallel,
        tensors=tensors,
        parameters=parameter_entries(setup.applied.store.infos.values()),
        optimizer=optimizer_values(setup),
        scheduler=states.get("scheduler"),
        scaler=states.get("scaler"),
        classes={name: kind_of(parts[name], state) for name, state in states.items()},
        counters={
            "steps": engine.steps,
            "skipped": engine.skipped,
            "micro_steps": engine.micro_steps,
            "samples": engine.samples,
        },
        has={"client_state": client_state is not None, "tracked": sorted(engine._tracked)},
    )
