"""What the tests of ``shm`` share: ranks whose default group is of the backend under test, and the oracle of its sums.

POLYSCALE_TEST_COMMUNICATION=gloo    tries the tests themselves on a backend that is known to be right
"""

from __future__ import annotations

import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from polyscale._torch import default_store
from polyscale.discovery import load
from polyscale.errors import PolyscaleError
from polyscale.hooks import PluginContext
from polyscale.testing import ranks
from polyscale.testing.pool import RankPool

BACKEND = os.environ.get("POLYSCALE_TEST_COMMUNICATION", "shm")
only_shm = pytest.mark.skipif(BACKEND != "shm", reason=f"not promised by {BACKEND}")
TIMEOUT_S = 30.0
WORLDS = [2, pytest.param(4, marks=pytest.mark.long)]

REAL = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
INTEGER = [torch.int64, torch.int32, torch.int8, torch.uint8]
REDUCED = REAL + INTEGER
MOVED_ONLY = [torch.bool, torch.int16, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2]
ACCUMULATED_IN = {torch.bfloat16: torch.float32, torch.float16: torch.float32}

FUNCTIONS = {
    "SUM": torch.add,
    "AVG": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}


def on_ranks(world, function, *args, backend=BACKEND, timeout=60.0, group_timeout=TIMEOUT_S, **kwargs):
    """Call ``function`` on ranks whose default group is of ``backend``; the results by rank."""
    return ranks(world).run(_over, backend, group_timeout, function, args, kwargs, timeout=timeout)


def on_new_ranks(world, function, *args, backend=BACKEND, timeout=60.0, group_timeout=TIMEOUT_S, env=None):
    """``on_ranks`` in processes of their own, which end after it: for what changes a process."""
    pool = RankPool(world)
    try:
        return pool.run(_over, backend, group_timeout, function, args, {}, timeout=timeout, env=env)
    finally:
        pool.close()


def _over(backend, group_timeout, function, args, kwargs):
    regroup(backend, group_timeout)
    return function(*args, **kwargs)


def plugin(name=BACKEND):
    """The communication plugin under test."""
    return load("communication", name, PluginContext(name))


def regroup(backend, timeout=TIMEOUT_S, prefix="under-test"):
    """Replace the default group by one of ``backend``."""
    store, rank, world = default_store(), dist.get_rank(), dist.get_world_size()
    name = plugin(backend).backend("cpu")
    meet("left", prefix)  # a gloo group must not end while a rank still connects
    dist.destroy_process_group()
    dist.init_process_group(
        name,
        store=dist.PrefixStore(prefix, store),
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=timeout),
    )


def meet(*words):
    """Wait for all ranks without any collective."""
    store, key = default_store(), "/".join(map(str, words))
    store.set(f"{key}/{dist.get_rank()}", "here")
    store.wait([f"{key}/{rank}" for rank in range(dist.get_world_size())], timedelta(seconds=TIMEOUT_S))


def values(dtype, numel, rank, seed=0):
    """Seeded numbers of ``rank`` that can be added up and multiplied."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(numel, generator=generator, dtype=torch.float64).to(dtype)
    low = 0 if dtype in (torch.uint8, torch.bool) else -4
    return torch.randint(low, 5, (numel,), generator=generator).to(dtype)


def bits(dtype, numel, rank, seed=0):
    """Seeded bits of ``rank``, every pattern that ``dtype`` has (NaN with payload, -0.0, ...)."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    if dtype == torch.bool:
        return torch.randint(0, 2, (numel,), generator=generator).bool()
    return torch.randint(0, 256, (numel * dtype.itemsize,), generator=generator, dtype=torch.uint8).view(dtype)


def reduced(operation, inputs):
    """``inputs`` of all ranks, combined in rank order, in fp32 where they are narrower, and rounded once."""
    dtype = inputs[0].dtype
    wide = ACCUMULATED_IN.get(dtype, dtype)
    total = inputs[0].to(wide)
    for each in inputs[1:]:
        total = FUNCTIONS[operation](total, each.to(wide))
    if operation == "AVG":
        total = total / len(inputs)
    return total.to(dtype)


def same_bits(found, expected):
    """Whether two tensors are equal to the last bit."""
    raw = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in (found, expected)]
    return found.dtype == expected.dtype and torch.equal(*raw)


def same_numbers(found, expected):
    """Whether two tensors hold the same numbers: exactly over shm, nearly over backends that promise less."""
    if BACKEND == "shm":
        where = expected != expected
        return torch.equal(found != found, where) and torch.equal(
            found.masked_fill(where, 0), expected.masked_fill(where, 0)
        )
    loose = {torch.bfloat16: 0.05, torch.float16: 0.01}.get(found.dtype, 1e-5)
    return torch.allclose(found.double(), expected.double(), rtol=loose, atol=loose, equal_nan=True)


def raised(call):
    """The message of the error that ``call`` raises, or "nothing was raised"."""
    try:
        call()
    except (RuntimeError, PolyscaleError) as error:
        return str(error)
    return "nothing was raised"
