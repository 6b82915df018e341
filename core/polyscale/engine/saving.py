"""Writes a checkpoint: agree, write beside, rename. An earlier checkpoint stands until the new one is complete.

In order, on all ranks: (1) agree on path and tag, so a rank that does not save is named after a time-out; (2) check
what cannot be loaded again, before anything is written; (3) rank 0 makes a temporary directory; (4) all write their
boxes of tensors and their own file; (5) rank 0 writes the manifest and renames.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyscale.checkpoint.blobs import check_blob, save_blob
from polyscale.checkpoint.directory import CheckpointDirectory
from polyscale.checkpoint.manifest import Manifest, parameter_entries, write_manifest
from polyscale.checkpoint.names import TENSORS, check_tag
from polyscale.engine.setup import Setup
from polyscale.engine.state import model_tensors, optimizer_tensors, optimizer_values, own_buffers, random_state
from polyscale.engine.together import together
from polyscale.interfaces.observer import CheckpointSaved

if TYPE_CHECKING:
    from polyscale.engine.engine import Engine

CLIENT = "client_state.pt"


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
    control.agree("save", {"path": str(Path(path).absolute()), "tag": tag, "overwrite": overwrite}, what=what)
    own: dict[str, Any] = {}

    def check() -> None:
        check_tag(tag)
        check_blob(client_state, "client_state")
        own["tracked"] = {name: tracked.state_dict() for name, tracked in engine._tracked.items()}
        check_blob(own["tracked"], "tracked")

    together(control, "save-check", check, what=what)
    begun = together(control, "save-begin", lambda: _begin(setup, directory, tag, overwrite), what=what)
    temporary = Path(control.decide("save-directory", str(begun), what=what))
    try:
        tensors = {**model_tensors(setup), **optimizer_tensors(setup)}
        group = setup.topology.group("checkpoint") if setup.topology.world_size > 1 else None
        setup.checkpoint_storage().write(temporary / TENSORS, tensors, group)
        own["rng"] = random_state(setup)
        own["buffers"] = own_buffers(setup)
        together(control, "save-rank", lambda: save_blob(temporary / rank_file(setup.topology.rank), own), what=what)
        manifest = _manifest(engine, setup, tuple(tensors), client_state)
        together(
            control,
            "save-commit",
            lambda: _commit(setup, directory, temporary, tag, manifest, client_state, overwrite),
            what=what,
        )
    except BaseException:
        if setup.topology.rank == 0:
            directory.abort(temporary)
        raise
    setup.observers.tell(CheckpointSaved(str(directory.path(tag)), engine.steps, time.perf_counter() - started))
    return tag


def _begin(setup: Setup, directory: CheckpointDirectory, tag: str, overwrite: bool) -> Path | None:
    return directory.begin(tag, overwrite=overwrite) if setup.topology.rank == 0 else None


def _commit(
    setup: Setup,
    directory: CheckpointDirectory,
    temporary: Path,
    tag: str,
    manifest: Manifest,
    client_state: Any,
    overwrite: bool,
) -> None:
    if setup.topology.rank == 0:
        if client_state is not None:
            save_blob(temporary / CLIENT, client_state, name="client_state")
        write_manifest(temporary, manifest)
        directory.commit(temporary, tag, overwrite)


def _manifest(engine: Engine, setup: Setup, tensors: tuple[str, ...], client_state: Any) -> Manifest:
    return Manifest(
        world_size=setup.topology.world_size,
        stage=setup.config.zero_optimization.stage,
        data_parallel=setup.data_parallel,
        tensors=tensors,
        parameters=parameter_entries(setup.applied.store.infos.values()),
        optimizer=optimizer_values(setup),
        scheduler=engine.lr_scheduler.state_dict() if engine.lr_scheduler is not None else None,
        scaler=setup.scaler.state_dict() if setup.scaler is not None else None,
        counters={
            "steps": engine.steps,
            "skipped": engine.skipped,
            "micro_steps": engine.micro_steps,
            "samples": engine.samples,
        },
        has={"client_state": client_state is not None, "tracked": sorted(engine._tracked)},
    )
