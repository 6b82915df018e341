"""Entry points ``scale``, ``polyscale`` and ``scale-report``.

Notable: ``--version`` and plain calls of the report are answered without importing the command-line framework.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from polyscale_cli.boundary import OK, guarded


def main(arguments: Sequence[str] | None = None) -> int:
    """``scale``: returns the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug, words = without_debug(words)
    return guarded(lambda: _dispatch(words), debug=debug)


def report_main(arguments: Sequence[str] | None = None) -> int:
    """``scale-report``: ``scale report`` under a name of its own."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    return main(words if words == ["--version"] else ["report", *words])


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
