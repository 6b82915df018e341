"""From boxes to DCP's plans, and back.

Notable: one write item per box that this rank owns and that is not empty; the global plan is checked to tile every
tensor, and a tensor without elements is kept in the metadata without any data. A read item is an overlap of a box with
a stored block (``create_read_items_for_chunk_list`` finds them), and every box must be filled to its last element.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from polyscale.errors import CheckpointError, nearest
from polyscale.interfaces.checkpoint import Box, LogicalTensor
from polyscale_standard.checkpoint.cover import Block, fault, inside


class BoxSavePlanner(SavePlanner):
    """Plans the writing of the boxes that this rank owns."""

    def __init__(self, tensors: Mapping[str, LogicalTensor]) -> None:
        self._tensors = tensors
        self._data: dict[tuple[str, tuple[int, ...]], tuple[torch.Tensor, torch.dtype]] = {}

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """Nothing: the tensors are given to the constructor."""

    def create_local_plan(self) -> SavePlan:
        """One item per box owned; ``planner_data`` tells rank 0 the shape and dtype of all tensors of this rank."""
        items: list[WriteItem] = []
        for name, tensor in self._tensors.items():
            for box in _filled(name, tensor):
                if not box.owner:
                    continue
                key = (name, tuple(box.offsets))
                if key in self._data:
                    raise CheckpointError(f"Tensor '{name}'", why=f"two boxes of this rank begin at {key[1]}")
                self._data[key] = (box.data, tensor.dtype)
                items.append(_write_item(name, tensor, box))
        known = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in self._tensors.items()}
        return SavePlan(items, planner_data=known)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Put all plans together. Rank 0 only.

        Raises:
            CheckpointError: ranks disagree about a tensor, or their boxes do not tile it.
        """
        entries: dict[str, TensorStorageMetadata] = {}
        for rank, plan in enumerate(all_plans):
            for name, (shape, dtype) in plan.planner_data.items():
                entry = entries.setdefault(
                    name, TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(shape), [])
                )
                if (tuple(entry.size), entry.properties.dtype) != (shape, dtype):
                    raise CheckpointError(
                        f"Tensor '{name}' is {list(shape)} {dtype} on rank {rank}",
                        why=f"on a rank before it is {list(entry.size)} {entry.properties.dtype}",
                        fix="Build the same model on every rank",
                    )
        self._check_tiling(entries, all_plans)
        plans = []
        for plan in all_plans:
            for item in plan.items:
                assert item.tensor_data is not None
                entries[item.index.fqn].chunks.append(item.tensor_data.chunk)
            plans.append(SavePlan(plan.items))
        paths = {name: (name,) for name in entries}  # as torch writes for a flat state dict
        return plans, Metadata(dict(entries), planner_data=paths)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Take the plan as it is."""
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """The values of a box, in the dtype of the logical tensor."""
        assert write_item.index.offset is not None
        data, dtype = self._data[write_item.index.fqn, tuple(write_item.index.offset)]
        return data.detach().to(dtype)

    @staticmethod
    def _check_tiling(entries: Mapping[str, TensorStorageMetadata], plans: Sequence[SavePlan]) -> None:
        blocks: dict[str, list[Block]] = {name: [] for name in entries}
        for rank, plan in enumerate(plans):
            for item in plan.items:
                assert item.tensor_data is not None
                chunk = item.tensor_data.chunk
                blocks[item.index.fqn].append(Block(tuple(chunk.offsets), tuple(chunk.sizes), rank))
        for name, entry in entries.items():
            why = fault(tuple(entry.size), blocks[name])
            if why:
                raise CheckpointError(f"Tensor '{name}' of shape {list(entry.size)} cannot be written", why=why)


class BoxLoadPlanner(LoadPlanner):
    """Plans the filling of all boxes of this rank, converting dtypes."""

    def __init__(self, tensors: Mapping[str, LogicalTensor], metadata: Metadata) -> None:
        self._tensors = tensors
        self._metadata = metadata
        self._boxes: dict[str, list[Box]] = {}

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Nothing: tensors and metadata are given to the constructor."""

    def create_local_plan(self) -> LoadPlan:
        """One item per overlap of a box with a stored block.

        Raises:
            CheckpointError: a name, shape or kind of number differs, or what is stored does not fill a box.
        """
        items: list[ReadItem] = []
        for name, tensor in self._tensors.items():
            entry = self._entry(name, tensor)
            boxes = self._boxes[name] = list(_filled(name, tensor))
            wanted = [ChunkStorageMetadata(torch.Size(box.offsets), box.data.shape) for box in boxes]
            found = create_read_items_for_chunk_list(name, entry, wanted)
            if sum(math.prod(item.lengths) for item in found) != sum(box.data.numel() for box in boxes):
                raise CheckpointError(
                    f"Tensor '{name}' cannot be filled",
                    why="the checkpoint holds only a part of it, or a part twice",
                    fix="Load another checkpoint",
                )
            items.extend(found)
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Every rank reads what it planned."""
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """Take the plan as it is."""
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Never planned: only tensors are read."""
        raise NotImplementedError

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """The part of a box that a stored block fills; the reader copies into it, and so converts."""
        assert read_item.dest_index.index is not None
        part = self._boxes[read_item.dest_index.fqn][read_item.dest_index.index].data.detach()
        for dimension, (first, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            part = part.narrow(dimension, first, length)
        return part

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Nothing: the box itself was filled."""

    def _entry(self, name: str, tensor: LogicalTensor) -> TensorStorageMetadata:
        entry = self._metadata.state_dict_metadata.get(name)
        if not isinstance(entry, TensorStorageMetadata):
            close = nearest(name, self._metadata.state_dict_metadata)
            fix = f"Did you mean '{close}'?" if close else "Build the model that was saved"
            raise CheckpointError(f"Tensor '{name}'", why="the checkpoint does not hold it", fix=fix)
        if tuple(entry.size) != tuple(tensor.shape):
            raise CheckpointError(
                f"Tensor '{name}' of shape {list(tensor.shape)}",
                why=f"the checkpoint holds it with shape {list(entry.size)}",
                fix="Build the model that was saved",
            )
        if entry.properties.dtype.is_complex and not all(box.data.is_complex() for box in tensor.boxes):
            raise CheckpointError(f"Tensor '{name}' is real", why="the checkpoint holds complex numbers")
        return entry


def _filled(name: str, tensor: LogicalTensor) -> Iterator[Box]:
    """The boxes that hold something, each checked to lie in its tensor."""
    for box in tensor.boxes:
        if not inside(tensor.shape, box.offsets, box.data.shape):
            raise CheckpointError(
                f"Box at {tuple(box.offsets)} of shape {list(box.data.shape)}",
                why=f"it does not lie in tensor '{name}' of shape {list(tensor.shape)}",
            )
        if box.data.numel():
            yield box


def _write_item(name: str, tensor: LogicalTensor, box: Box) -> WriteItem:
    offsets = torch.Size(box.offsets)
    return WriteItem(
        index=MetadataIndex(name, offsets),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(offsets, box.data.shape),
            properties=TensorProperties(dtype=tensor.dtype),
            size=torch.Size(tensor.shape),
        ),
    )
