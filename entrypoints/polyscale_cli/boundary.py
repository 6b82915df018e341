"""Where exceptions end: exit codes and what the user is told.

Notable: 2 for what the user can mend (``Error:``, no traceback), 1 for a defect of ours (a traceback only on demand),
130 for Ctrl-C, 141 for a reader that has gone (``| head``), silently, as other programs do.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable

from polyscale.errors import PolyscaleError
from polyscale_cli import env

OK, DEFECT, USER_ERROR, INTERRUPTED, BROKEN_PIPE = 0, 1, 2, 130, 141


def guarded(call: Callable[[], int], *, debug: bool = False) -> int:
    """Run a command and return its exit code, whatever happens in it.

    Args:
        call: the command; it returns its exit code.
        debug: whether an unexpected error shows its traceback.
    """
    try:
        code = call()
        sys.stdout.flush()
    except PolyscaleError as error:
        return _tell(f"Error: {error}", USER_ERROR)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        _forget_stdout()
        return BROKEN_PIPE
    except Exception as error:
        if debug or env.debug():
            traceback.print_exc()
            return DEFECT
        text = " ".join(str(error).split())
        hint = f"This is a defect of polyscale. For the traceback set {env.DEBUG}=1"
        return _tell(f"Error: {type(error).__name__}: {text}. {hint}", DEFECT)
    return code


def _tell(message: str, code: int) -> int:
    try:
        sys.stdout.flush()
        print(message, file=sys.stderr)
    except BrokenPipeError:
        _forget_stdout()
    return code


def _forget_stdout() -> None:
    """Let the interpreter's last flush of stdout go nowhere, or it would complain at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
