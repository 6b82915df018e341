"""A dataset whose samples do not depend on which worker fetches them."""

from __future__ import annotations

import random
from typing import Any

import numpy
import torch
from torch.utils.data import Dataset, get_worker_info

from polyscale.data.order import stable_hash


class Seeded(Dataset[Any]):
    """``dataset``; in a worker, each sample is fetched under a seed of its own: a hash of ``seed`` and its index."""

    def __init__(self, dataset: Any, seed: int) -> None:
        self._dataset = dataset
        self._seed = seed

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        self._seed_worker(index)
        return self._dataset[index]

    def __getitems__(self, indices: list[int]) -> list[Any]:
        many = getattr(self._dataset, "__getitems__", None)
        if many is None:
            return [self[index] for index in indices]
        self._seed_worker(indices[0])
        return list(many(indices))

    def _seed_worker(self, index: int) -> None:
        if get_worker_info() is not None:
            seed = stable_hash(self._seed, index)
            torch.default_generator.manual_seed(seed)
            random.seed(seed)
            numpy.random.seed(seed % 2**32)
