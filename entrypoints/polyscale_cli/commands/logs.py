"""Where polyscale's own log lines go while a command runs."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def logs_to_stderr() -> Iterator[None]:
    """Show warnings and errors on stderr, as plain lines."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    with _only(handler):
        yield


@contextlib.contextmanager
def logs_dropped() -> Iterator[None]:
    """Show nothing: the command says it itself."""
    with _only(logging.NullHandler()):
        yield


@contextlib.contextmanager
def _only(handler: logging.Handler) -> Iterator[None]:
    logger = logging.getLogger("polyscale")
    propagated = logger.propagate
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagated
