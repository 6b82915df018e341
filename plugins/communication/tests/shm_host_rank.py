"""A rank of ``test_shm_hosts.py``, started as a program: joins the group, computes, prints what it found as JSON."""

from __future__ import annotations

import json
import os
import sys
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist


def group_of(ranks: list[int]) -> dict[str, object]:
    """What a group of ``ranks`` computes, and why it uses gloo; empty where this rank is not of it."""
    group = dist.new_group(ranks)
    if dist.get_rank() not in ranks:
        return {}
    total = torch.full((70_001,), float(dist.get_rank() + 1))
    dist.all_reduce(total, group=group)
    return {"total": total.unique().tolist(), "why_gloo": group.why_gloo}


def main(store: str, rank: int, world: int) -> None:
    """Groups of all ranks, and of those of one host."""
    import polyscale_communication

    polyscale_communication.register()
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        dist.init_process_group(
            "shm", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=30)
        )
        found = {"all": group_of([0, 1, 2]), "here": group_of([0, 1]), "across": group_of([1, 2])}
        received = torch.zeros(3)
        works = [
            dist.isend(torch.full((3,), float(rank)), (rank + 1) % world),
            dist.irecv(received, (rank - 1) % world),
        ]
        for work in works:
            work.wait()
    dist.barrier()
    print(json.dumps({**found, "received": received.tolist()}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
