"""Running the tree of commands, with the framework's own errors told our way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import typer
import typer.main

from polyscale.errors import PolyscaleError
from polyscale_cli.app import app

# The base of the framework's errors, wherever this release of typer keeps it (click, or a copy of it).
_CLICK_ERROR: type[Exception] = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")


def invoke(words: Sequence[str]) -> int:
    """Run the command that ``words`` name; returns its exit code.

    Raises:
        PolyscaleError: no such command or option, or a bad value.
        BrokenPipeError: the reader of stdout has gone.
    """
    try:
        code = typer.main.get_command(app).main(args=list(words), prog_name="scale", standalone_mode=False)
    except _CLICK_ERROR as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            print(_message(error))
            return 2
        raise _translated(error) from error
    except typer.Abort:
        return 130
    except SystemExit as ended:
        if isinstance(ended.__context__, BrokenPipeError):  # the framework ends the process with 1
            raise BrokenPipeError from None
        raise
    return code if isinstance(code, int) else 0


def _translated(error: Exception) -> PolyscaleError:
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else "scale"
    return PolyscaleError(_message(error), fix=f"Run: {path} --help")


def _message(error: Any) -> str:
    return str(error.format_message())
