"""The numbers under which the transport knows collectives, dtypes and reductions (``group.h``, ``sums.h``).

Notable: dtypes without arithmetic are moved as they are; a complex sum is one of pairs of its real dtype.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from typing import Any

import torch

BACKEND = "ProcessGroupShm"


class Kind(IntEnum):
    """Collectives."""

    ALL_GATHER = 0
    REDUCE_SCATTER = 1
    ALL_REDUCE = 2
    BROADCAST = 3
    REDUCE = 4
    GATHER = 5
    SCATTER = 6
    ALL_TO_ALL = 7
    BARRIER = 8


DTYPES = (
    "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64", "bool",
    "complex64", "complex128", "uint16", "uint32", "uint64", "complex32", "float8_e4m3fn", "float8_e5m2",
    "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu",
)  # fmt: skip
OPERATIONS = ("sum", "product", "min", "max", "band", "bor", "bxor", "avg", "premul_sum")
NO_OPERATION = len(OPERATIONS)
_BITS = ("band", "bor", "bxor")
_PAIRS = {torch.complex32: torch.float16, torch.complex64: torch.float32, torch.complex128: torch.float64}
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_OF_PAIRS = ("sum", "avg", "premul_sum")


@lru_cache(maxsize=64)
def number_of(dtype: torch.dtype) -> tuple[int, int]:
    """(number, elements of the transport for each of torch's) of a dtype; unknown ones are bytes."""
    name = _name(dtype)
    if name in DTYPES:
        return DTYPES.index(name), 1
    return len(DTYPES), dtype.itemsize


@dataclass(frozen=True)
class Reduction:
    """A reduction of one dtype.

    Attributes:
        operation: its number.
        dtype: number of the dtype that is reduced.
        times: elements of that for each of the tensor.
        factor: of premul_sum.
    """

    operation: int
    dtype: int
    times: int = 1
    factor: float = 1.0


def reduction_of(given: Any, dtype: torch.dtype) -> Reduction:
    """Translate c10d's ``ReduceOp``.

    Raises:
        RuntimeError: the dtype cannot be reduced, or not in this way.
    """
    kind = getattr(given, "op", given)
    name: str = kind.name.lower()
    if name == "premul_sum":
        return _reduction(name, dtype, _factor(given))
    return _plain(name, dtype)


@lru_cache(maxsize=256)
def _plain(name: str, dtype: torch.dtype) -> Reduction:
    return _reduction(name, dtype, 1.0)


def _reduction(name: str, dtype: torch.dtype, factor: float) -> Reduction:
    real = _PAIRS.get(dtype)
    number, _ = number_of(real or dtype)
    known = number <= DTYPES.index("bool")
    floating = dtype.is_floating_point or real is not None
    refused = (name in _BITS and floating) or (real is not None and name not in _OF_PAIRS)
    if not known or refused or (dtype == torch.bool and name in ("avg", "premul_sum")) or name not in OPERATIONS:
        raise RuntimeError(f"{BACKEND} does not support reductions ({name}) of {_name(dtype)}")
    if name == "premul_sum" and not floating:
        valid = ", ".join(_name(each) for each in (*_FLOATS, *_PAIRS))
        why = f"its factor, {factor:g} here, is a real number. Valid: {valid}"
        raise RuntimeError(f"{BACKEND} does not support reductions ({name}) of {_name(dtype)}: {why}")
    return Reduction(OPERATIONS.index(name), number, 2 if real is not None else 1, factor)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _factor(given: Any) -> float:
    factor = getattr(given, "factor", None)  # since torch 2.13
    if factor is None:
        factor = given.__getstate__()[1]
    return float(factor)
