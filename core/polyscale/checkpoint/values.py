"""Plain Python values in JSON, and back exactly: tuples, numbers as keys, counters and numbers that JSON lacks.

Notable: hyper-parameters and scheduler states hold a little more than JSON knows (``betas`` is a tuple, ``milestones``
is a counter with integer keys). What JSON knows is written as it is; the rest as an object with one key that begins
with "__". Anything else is refused with its place, so that nothing is written that cannot be read back.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

from polyscale.errors import CheckpointError

_READERS: dict[str, Callable[[Any], Any]] = {
    "__tuple__": lambda value: tuple(decode(item) for item in value),
    "__dict__": lambda value: {decode(key): decode(item) for key, item in value},
    "__counter__": lambda value: Counter({decode(key): decode(item) for key, item in value}),
    "__float__": float,
}


def encode(value: Any, where: str = "value") -> Any:
    """Turn ``value`` into what JSON holds.

    Args:
        value: None, bool, int, float, str, list, tuple, dict, Counter of these; a tensor or array of one element
            becomes its number.
        where: how to call it in an error.

    Raises:
        CheckpointError: it holds something else.
    """
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"__float__": repr(value)}
    if type(value) is list:
        return [encode(item, f"{where}[{index}]") for index, item in enumerate(value)]
    if type(value) is tuple:
        return {"__tuple__": encode(list(value), where)}
    if isinstance(value, dict):
        return _encode_dict(value, where)
    if callable(getattr(value, "item", None)) and getattr(value, "shape", None) in ((), (1,)):
        return encode(value.item(), where)
    raise CheckpointError(
        f"{where} is a {type(value).__module__}.{type(value).__qualname__}",
        why="a manifest holds numbers, strings, None, lists, tuples and dicts",
        fix="Put it in client_state as one of these, or as a tensor",
    )


def decode(value: Any) -> Any:
    """Turn what :func:`encode` made, read from JSON, back."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        (key, inner), *_ = value.items()
        if key in _READERS:
            return _READERS[key](inner)
    return {key: decode(item) for key, item in value.items()}


def _encode_dict(value: dict[Any, Any], where: str) -> Any:
    pairs = [(key, encode(item, f"{where}[{key!r}]")) for key, item in value.items()]
    if isinstance(value, Counter):
        return {"__counter__": [[encode(key, f"key of {where}"), item] for key, item in pairs]}
    if all(type(key) is str for key, _ in pairs) and not (len(pairs) == 1 and pairs[0][0] in _READERS):
        return dict(pairs)
    return {"__dict__": [[encode(key, f"key of {where}"), item] for key, item in pairs]}
