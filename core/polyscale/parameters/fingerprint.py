"""Fingerprint of a model: what must be equal on all ranks before the first collective.

Notable: it looks at names, shapes, dtypes and ``requires_grad`` only, never at values, so it costs microseconds a
tensor, works for real, deferred and meta models alike, and travels as JSON through the store.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Literal

import torch
from torch import nn

from polyscale.errors import PolyscaleError
from polyscale.parameters.deferred_log import history_of

Start = Literal["real", "deferred", "meta"]


@dataclass(frozen=True)
class Entry:
    """One parameter or buffer.

    Attributes:
        name: its name in the model; every name of a tied one is an entry.
        shape: its shape.
        dtype: its dtype, without ``torch.``.
        requires_grad: whether it is trained; False for buffers.
        tied_to: the first name of the same tensor; "" where this is the first.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    requires_grad: bool
    tied_to: str = ""

    def __str__(self) -> str:
        details = [f"shape {list(self.shape)}", self.dtype]
        details += ["trained" if self.requires_grad else "not trained"]
        details += [f"tied to {self.tied_to}"] if self.tied_to else []
        return f"{self.name} ({', '.join(details)})"


@dataclass(frozen=True)
class Fingerprint:
    """Parameters and buffers of a model in order.

    Attributes:
        parameters: in the order of ``named_parameters``.
        buffers: in the order of ``named_buffers``.
        start: "real", "deferred" or "meta", as in ``Materializer.kind``: ranks that start differently would wait for
            different collectives.
        digest: of all of this.
    """

    parameters: tuple[Entry, ...]
    buffers: tuple[Entry, ...]
    start: str = "real"
    digest: str = field(default="")

    def __post_init__(self) -> None:
        object.__setattr__(self, "digest", hashlib.blake2b(self._text().encode(), digest_size=16).hexdigest())

    def to_json(self) -> str:
        """One line of JSON."""
        return self._text()

    @classmethod
    def from_json(cls, text: str) -> Fingerprint:
        """Read what :meth:`to_json` wrote.

        Raises:
            PolyscaleError: ``text`` is not a fingerprint.
        """
        try:
            data = json.loads(text)
            return cls(_entries(data["parameters"]), _entries(data["buffers"]), str(data["start"]))
        except (ValueError, KeyError, TypeError) as error:
            raise PolyscaleError(
                f"A model fingerprint of {len(text)} characters",
                why=f"it cannot be read ({error!r})",
                fix="Run the same version of polyscale on every rank",
            ) from error

    def _text(self) -> str:
        def rows(entries: tuple[Entry, ...]) -> list[list[object]]:
            return [[e.name, list(e.shape), e.dtype, e.requires_grad, e.tied_to] for e in entries]

        data = {"start": self.start, "parameters": rows(self.parameters), "buffers": rows(self.buffers)}
        return json.dumps(data, separators=(",", ":"))


def fingerprint(model: nn.Module) -> Fingerprint:
    """Take the fingerprint of a model. Reads no values."""
    first: dict[int, str] = {}

    def entry(name: str, tensor: object, *, trained: bool) -> Entry:
        known = first.setdefault(id(tensor), name)
        shape, dtype = getattr(tensor, "shape", ()), str(getattr(tensor, "dtype", "")).removeprefix("torch.")
        return Entry(name, tuple(shape), dtype, trained, known if known != name else "")

    parameters = model.named_parameters(remove_duplicate=False)
    buffers = model.named_buffers(remove_duplicate=False)
    return Fingerprint(
        tuple(entry(name, parameter, trained=parameter.requires_grad) for name, parameter in parameters),
        tuple(entry(name, buffer, trained=False) for name, buffer in buffers),
        start_of([*model.parameters(), *model.buffers()]),
    )


def start_of(tensors: Iterable[torch.Tensor]) -> Start:
    """Where starting values come from: "deferred" where any tensor is, else "meta" where any is, else "real"."""
    start: Start = "real"
    for tensor in tensors:
        if history_of(tensor) is not None:
            return "deferred"
        if tensor.is_meta:
            start = "meta"
    return start


def first_difference(a: Fingerprint, b: Fingerprint) -> str | None:
    """Name the first parameter (then buffer) in which two models differ, with both values; None where they agree."""
    for kind, ours, theirs in (("parameter", a.parameters, b.parameters), ("buffer", a.buffers, b.buffers)):
        for number, (mine, other) in enumerate(zip_longest(ours, theirs)):
            if mine != other:
                return f"{kind} {number}: {mine or 'absent'} against {other or 'absent'}"
    if a.start != b.start:
        return f"the model's start: {a.start} against {b.start}"
    return None


def _entries(rows: list[list[object]]) -> tuple[Entry, ...]:
    return tuple(
        Entry(str(name), tuple(int(size) for size in shape), str(dtype), bool(trained), str(tied))  # type: ignore[attr-defined]
        for name, shape, dtype, trained, tied in rows
    )
