"""The files of a checkpoint that are small, read and checked before anything is changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polyscale.checkpoint.blobs import load_blob
from polyscale.checkpoint.manifest import Manifest, read_manifest
from polyscale.checkpoint.names import TENSORS
from polyscale.engine.saving import CLIENT, rank_file
from polyscale.engine.setup import Setup
from polyscale.errors import CheckpointError
from polyscale.interfaces.checkpoint import StoredTensor


@dataclass(frozen=True)
class Files:
    """What they hold.

    Attributes:
        manifest: the manifest.
        contents: the tensors that there are.
        tracked: states of tracked objects, by name, of this rank; of rank 0 where fewer ranks saved.
        rng: random numbers of the same rank.
        buffers: buffers of the same rank.
        client_state: what ``save(client_state=...)`` was given.
        same_world: whether as many ranks saved it.
    """

    manifest: Manifest
    contents: Mapping[str, StoredTensor]
    tracked: Mapping[str, Any]
    rng: Mapping[str, Any]
    buffers: Mapping[str, Any]
    client_state: Any
    same_world: bool


def read_files(setup: Setup, directory: Path) -> Files:
    """Read them. Local.

    Raises:
        CheckpointError: one is missing or damaged, or of a newer format; or tensors of the manifest are missing.
    """
    manifest = read_manifest(directory)
    contents = setup.checkpoint_storage().contents(directory / TENSORS)
    lost = [name for name in manifest.tensors if name not in contents]
    if lost:
        raise CheckpointError(
            f"{directory} lacks {len(lost)} tensors ({', '.join(lost[:5])})",
            why="its manifest lists them",
            fix="The directory was changed or damaged: load another checkpoint",
        )
    here, saved = setup.topology.world_size, manifest.world_size
    own = _rank_state(directory / rank_file(setup.topology.rank if setup.topology.rank < saved else 0))
    return Files(
        manifest=manifest,
        contents=contents,
        tracked=own["tracked"],
        rng=own["rng"],
        buffers=own["buffers"],
        client_state=load_blob(directory / CLIENT) if manifest.has.get("client_state") else None,
        same_world=here == saved,
    )


def _rank_state(path: Path) -> Mapping[str, Mapping[str, Any]]:
    state = load_blob(path)
    if not isinstance(state, dict) or not all(isinstance(state.get(key), dict) for key in _PARTS):
        raise CheckpointError(
            f"{path} cannot be read", why=f"it does not hold {', '.join(_PARTS)}", fix="Load another checkpoint"
        )
    return state


_PARTS = ("tracked", "rng", "buffers")
