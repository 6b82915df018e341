"""Writing and reading a directory of tensors: DCP's file writer and reader, our planners, our agreement of ranks.

A write makes two collective steps over ``group``, and so does a read:

1. plan: every rank plans; rank 0 checks all plans together and gives each rank its own;
2. write (then rank 0 writes ``.metadata``), or read.

Notable: DCP's own ``save`` and ``load`` are not called, because they raise pickled exceptions of all layers, warn when
there is no process group, and unpickle ``.metadata`` as it comes. A read fills nothing before every rank has planned
and found the files long enough.
"""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan

from polyscale.checkpoint.durable import fsync_directory
from polyscale.errors import CheckpointError
from polyscale.interfaces.checkpoint import LogicalTensor, StoredTensor
from polyscale_standard.checkpoint.metadata import check_files, read_metadata
from polyscale_standard.checkpoint.planners import BoxLoadPlanner, BoxSavePlanner
from polyscale_standard.checkpoint.ranks import Ranks


def write(
    directory: str | PathLike[str], tensors: Mapping[str, LogicalTensor], group: dist.ProcessGroup | None
) -> None:
    """Write the owners' boxes of ``tensors`` into an existing, empty ``directory`` and fsync. Collective.

    Raises:
        CheckpointError: on every rank, naming rank, path and cause, when one failed.
    """
    ranks = Ranks(group, directory)
    planner = BoxSavePlanner(tensors)
    writer = _Writer(directory, sync_files=True, overwrite=False)
    metadata: list[Metadata] = []  # on rank 0, once planned

    def plan() -> SavePlan:
        _check_empty(Path(directory))
        writer.set_up_storage_writer(ranks.rank == 0)
        return writer.prepare_local_plan(planner.create_local_plan())

    def merge(plans: list[SavePlan]) -> list[SavePlan]:
        plans, merged = planner.create_global_plan(plans)
        metadata.append(merged)
        return writer.prepare_global_plan(plans)

    mine = ranks.central("written", plan, merge)

    def write_data() -> Any:
        results = writer.write_data(planner.finish_plan(mine), planner).wait()
        fsync_directory(Path(directory))
        return results

    def finish(results: list[Any]) -> list[None]:
        writer.finish(metadata[0], results)
        fsync_directory(Path(directory))
        return [None] * ranks.world

    ranks.central("written", write_data, finish)


def contents(directory: str | PathLike[str]) -> dict[str, StoredTensor]:
    """Names, shapes and dtypes in ``directory``. Local.

    Raises:
        CheckpointError: there is no checkpoint, or it is damaged or malicious.
    """
    entries = read_metadata(directory).state_dict_metadata
    return {
        name: StoredTensor(tuple(entry.size), entry.properties.dtype)
        for name, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def read(directory: str | PathLike[str], tensors: Mapping[str, LogicalTensor], group: dist.ProcessGroup | None) -> None:
    """Fill the boxes of ``tensors``. Collective.

    Raises:
        CheckpointError: on every rank, when one failed: a name is not in ``contents``, a shape differs, a file is
            missing, cut short or damaged. Only a file damaged inside its length may leave boxes half filled.
    """
    ranks = Ranks(group, directory)
    reader = FileSystemReader(directory)
    planned: list[tuple[LoadPlan, BoxLoadPlanner]] = []

    def plan() -> None:
        metadata = read_metadata(directory)
        planner = BoxLoadPlanner(tensors, metadata)
        reader.set_up_storage_reader(metadata, ranks.rank == 0)
        local = reader.prepare_local_plan(planner.create_local_plan())
        check_files(directory, metadata, {item.storage_index for item in local.items})
        planned.append((local, planner))

    ranks.together("read", plan)
    local, planner = planned[0]
    begun = "Some tensors may hold values of it now: load another checkpoint before training goes on"
    ranks.together("read", lambda: reader.read_data(local, planner).wait(), warning=begun)


class _Writer(FileSystemWriter):
    """DCP's writer, which keeps the name of a temporary directory out of the metadata."""

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(save_id=self.save_id)


def _check_empty(directory: Path) -> None:
    if not directory.is_dir():
        raise CheckpointError(
            f"{directory} is no directory here",
            fix="Make it first; on several hosts it must be on a file system that all of them share",
        )
    if any(directory.iterdir()):
        raise CheckpointError(f"{directory} is not empty", fix="Write into a new directory")
