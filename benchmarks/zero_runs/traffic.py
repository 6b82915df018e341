"""Bytes of one step: what the collectives that were called send, and what the loopback interface carried.

Notable: torch's profiler names every collective that gloo runs, also those of C++ (DDP's reducer), with its shapes and
dtypes: so all sides are counted by the same means. gloo has no reduce-scatter of its own: it runs an all-reduce, and is
counted as such. Collectives that bypass c10d are counted where polyscale's communication object is called.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# Bytes that a rank sends, on average over ranks, for a collective that is given n bytes by each of N ranks.
_SENT: dict[str, Callable[[float, int], float]] = {
    "all_reduce": lambda n, world: 2 * (world - 1) / world * n,
    "all_gather": lambda n, world: (world - 1) * n,
    "reduce_scatter": lambda n, world: (world - 1) / world * n,
    "all_to_all": lambda n, world: (world - 1) / world * n,
    "broadcast": lambda n, world: (world - 1) / world * n,
    "reduce": lambda n, world: (world - 1) / world * n,
    "gather": lambda n, world: (world - 1) / world * n,
    "scatter": lambda n, world: (world - 1) / world * n,
    "send": lambda n, world: n,
    "recv": lambda n, world: 0.0,
    "barrier": lambda n, world: 0.0,
}
_WIDTHS = {"double": 8, "float": 4, "c10::BFloat16": 2, "c10::Half": 2, "long": 8, "long int": 8, "int": 4}


class Counter:
    """Collectives by name: how many, the bytes given to them, and the bytes sent."""

    def __init__(self, world: int) -> None:
        self._world = world
        self._found: dict[str, list[float]] = defaultdict(lambda: [0, 0.0, 0.0])

    def add(self, name: str, given: float) -> None:
        """One more collective that was given ``given`` bytes.

        Raises:
            ValueError: nothing is known of this collective.
        """
        if name not in _SENT:
            raise ValueError(f"collective {name!r} cannot be counted; known are {', '.join(_SENT)}")
        entry = self._found[name]
        entry[0] += 1
        entry[1] += given
        entry[2] += _SENT[name](given, self._world)

    def table(self) -> dict[str, dict[str, float]]:
        """By collective: calls, bytes given, bytes sent."""
        keys = ("calls", "given", "sent")
        return {name: dict(zip(keys, entry, strict=True)) for name, entry in sorted(self._found.items())}


def count_step(step: Callable[[], Any], communication: Any, world: int) -> dict[str, Any]:
    """Run ``step`` and return its collectives: those of gloo, and those of ``communication`` where it is not c10d's."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    own = Counter(world)
    with (
        _counted(communication, own),
        profile(activities=[ProfilerActivity.CPU], record_shapes=True, acc_events=False) as profiler,
    ):
        result = step()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    gloo = Counter(world)
    for event in events:
        prefix, _, name = event.get("name", "").partition(":")
        if prefix == "gloo" and event.get("ph") == "X":
            gloo.add(_plain(name), _given(event.get("args", {})))
    tables = {"gloo": gloo.table(), "communication": own.table()}
    sent = sum(entry["sent"] for table in tables.values() for entry in table.values())
    return {"loss": float(torch.as_tensor(result)), "sent": sent, "collectives": tables}


def loopback_bytes() -> int:
    """Bytes that the loopback interface of this host has sent since it started; 0 where the system does not tell."""
    try:
        lines = Path("/proc/net/dev").read_text().splitlines()
    except OSError:
        return 0
    fields = next((line.partition(":")[2].split() for line in lines if line.strip().startswith("lo:")), [])
    return int(fields[8]) if len(fields) > 8 else 0


def _plain(name: str) -> str:
    """Gloo's own name of a collective without its variants ("all_gather_base" -> "all_gather")."""
    for known in sorted(_SENT, key=len, reverse=True):
        if name.replace("alltoall", "all_to_all").startswith(known):
            return known
    return name


def _given(arguments: dict[str, Any]) -> float:
    shapes, types = arguments.get("Input Dims", []), arguments.get("Input type", [])
    total = 0.0
    for shape, kind in zip(shapes, types, strict=False):
        if shape and all(isinstance(size, int) for size in shape):
            total += math.prod(shape) * _WIDTHS.get(kind, 1)
    return total


@contextmanager
def _counted(communication: Any, counter: Counter) -> Iterator[None]:
    """Count the calls of the class of ``communication``; None: count nothing."""
    if communication is None:
        yield
        return
    kind = type(communication)
    before = {name: getattr(kind, name) for name in _SENT if callable(getattr(kind, name, None))}
    own = {name for name in before if name in vars(kind)}

    def counting(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            tensors = [each for each in (*args, *kwargs.values()) if hasattr(each, "element_size")]
            # (output, input): what is given is the input; all else has one tensor.
            source = kwargs.get("input", tensors[-1] if tensors else None)
            counter.add(name, 0.0 if source is None else source.numel() * source.element_size())
            return method(self, *args, **kwargs)

        return call

    try:
        for name, method in before.items():
            setattr(kind, name, counting(name, method))
        yield
    finally:
        for name, method in before.items():
            if name in own:
                setattr(kind, name, method)
            else:
                delattr(kind, name)
