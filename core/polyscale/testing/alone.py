"""A function in a process of its own, which ends after it: for tests that change torch for the whole process."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from polyscale.testing.pool import RankPool


def alone(function: Callable[..., Any], *args: Any, env: Mapping[str, str] | None = None, **kwargs: Any) -> Any:
    """Return ``function(*args, **kwargs)``, run where torch is fresh, with warnings as errors.

    Args:
        function: at the top level of a file (a test module will do).
        args: its positional arguments, pickled.
        env: environment variables that are set meanwhile.
        kwargs: its keyword arguments.

    Raises:
        RanksFailed: it raised, ended the process, or did not finish in 60 s.
    """
    pool = _pool()
    try:
        (result,) = pool.run(function, *args, env=env, **kwargs)
    finally:
        pool.close()
    return result


@functools.cache
def _pool() -> RankPool:
    return RankPool(1)
