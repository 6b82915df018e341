"""Entry points ``scale``, ``polyscale`` and ``scale-report``.

Notable: ``--version`` and plain calls of the report are answered without importing the command-line framework.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence

from polyscale_cli.boundary import OK, guarded


def main(arguments: Sequence[str] | None = None) -> int:
    """``scale``: returns the exit code.

    Args:
        arguments: None: those of this process, which ends with the command.
    """
    if arguments is None:
        return _run(sys.argv[1:], ends=True)
    return _run(list(arguments))


def report_main(arguments: Sequence[str] | None = None) -> int:
    """``scale-report``: ``scale report`` under a name of its own."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    return _run(words if words == ["--version"] else ["report", *words], ends=arguments is None)


def _run(words: list[str], *, ends: bool = False) -> int:
    """Run a command; ``ends``: the process ends with it.

    Of a process that only reports, no cyclic garbage needs to be collected: looking through the objects that torch
    makes, again and again while it is imported and once more at exit, takes a quarter of the time of importing it.
    """
    debug, words = without_debug(words)
    short_lived = ends and words[:1] == ["report"]
    if short_lived:
        gc.disable()
    code = guarded(lambda: _dispatch(words), debug=debug)
    if short_lived:
        gc.freeze()
    return code


def without_debug(words: list[str]) -> tuple[bool, list[str]]:
    """Take ``--debug`` out; what comes after ``run`` belongs to the script."""
    end = words.index("run") + 1 if "run" in words else len(words)
    ours = [word for word in words[:end] if word != "--debug"]
    return len(ours) < end, ours + words[end:]


def _dispatch(words: list[str]) -> int:
    if words == ["--version"]:
        import polyscale

        print(f"polyscale {polyscale.__version__}")
        return OK
    if words[:1] == ["report"]:
        from polyscale_cli.commands.report_options import quick_options

        if (options := quick_options(words[1:])) is not None:
            from polyscale_cli.commands.report import run_report

            return run_report(options)
    from polyscale_cli.framework import invoke

    return invoke(words)
