"""Running a plugin's code without letting it print on stdout or end the process.

Notable: stdout carries our own results (JSON), so what a plugin prints goes elsewhere: Python's ``print`` into a log
line, a C library's ``printf`` (file descriptor 1) to stderr. ``exit()`` becomes an error; KeyboardInterrupt
and polyscale's own errors pass.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, TypeVar

from polyscale.errors import PluginError, PolyscaleError

logger = logging.getLogger("polyscale")
T = TypeVar("T")
_LOCK = threading.RLock()


def run_plugin_code(label: str, doing: str, call: Callable[[], T], *, fix: str) -> T:
    """Return ``call()``, with stdout redirected.

    Args:
        label: the plugin, as errors name it.
        doing: what is under way ("importing polyscale_x:Plugin").
        call: the plugin's code.
        fix: what the user can do about a failure.

    Raises:
        PluginError: the code tried to exit, or raised anything but KeyboardInterrupt or an error of polyscale's own,
            which pass through.
    """
    printed = io.StringIO()
    try:
        with _LOCK, _descriptor_to_stderr(), contextlib.redirect_stdout(printed):
            return call()
    except (KeyboardInterrupt, PolyscaleError):
        raise
    except BaseException as error:
        why = f"{doing} failed: {describe(error)}"
        raise PluginError(label, why=why, fix=fix) from error
    finally:
        if text := printed.getvalue().strip():
            logger.info("%s: %s printed: %s", label, doing, text)


def describe(error: BaseException) -> str:
    """Class and message of ``error`` in one line."""
    if isinstance(error, SystemExit):
        return f"it called exit({'' if error.code is None else error.code!r})"
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


@contextlib.contextmanager
def _descriptor_to_stderr() -> Iterator[None]:
    """Point file descriptor 1 to stderr for a while; does nothing where there are no such descriptors."""
    try:
        _flush(sys.stdout)
        saved = os.dup(1)
    except OSError:
        yield
        return
    try:
        with contextlib.suppress(OSError):
            os.dup2(2, 1)
        yield
    finally:
        _flush_c()
        os.dup2(saved, 1)
        os.close(saved)


def _flush(stream: Any) -> None:
    with contextlib.suppress(Exception):
        stream.flush()


def _flush_c() -> None:
    """Flush C's own buffers, or a library's text would come out on stdout after all, at exit."""
    with contextlib.suppress(Exception):
        _c_library().fflush(None)


@lru_cache(maxsize=1)
def _c_library() -> Any:
    """Symbols of this process; kept, since every call of a plugin's code asks."""
    import ctypes

    return ctypes.CDLL(None)
