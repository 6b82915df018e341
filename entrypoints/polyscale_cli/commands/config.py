"""``scale config``: options and help; the work is in ``config_check``, ``config_explain`` and ``config_init``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from polyscale_cli.commands.group import HELP, Commands

app = typer.Typer(
    cls=Commands,
    help="Check, explain and write configurations.\n\n"
    "Examples: scale config init --stage 2 -o zero2.json; scale config check zero2.json",
    no_args_is_help=True,
    rich_markup_mode=None,
    context_settings=HELP,
)
_CONFIG = Annotated[str, typer.Argument(metavar="CONFIG", help="A JSON file, JSON text, or - for stdin.")]


@app.command(context_settings=HELP)
def check(
    config: _CONFIG,
    nproc: Annotated[
        int | None, typer.Option("--nproc", "-n", help="Ranks on which the batch numbers must multiply.")
    ] = None,
    own_optimizer: Annotated[
        bool, typer.Option("--own-optimizer", help="The script passes an optimizer to polyscale.initialize.")
    ] = False,
) -> int:
    """Say all that is wrong with a configuration, without a model or a device. Exit code 2 when it cannot be used.

    Each mistake is a line with the path of its key. A value that is wrong is left out of what is checked next.

    Examples: scale config check zero2.json; scale config check zero2.json --nproc 2; scale config check - < zero2.json
    """
    from polyscale_cli.commands.config_check import run_check

    return run_check(config, nproc, own_optimizer=own_optimizer)


@app.command(context_settings=HELP)
def explain(config: _CONFIG) -> int:
    """Show each value, where it comes from, and what differs from DeepSpeed's default.

    In a pipe or a file each value is one line, its columns separated by tabs.

    Examples: scale config explain zero2.json; scale config explain zero2.json | grep zero_optimization
    """
    from polyscale_cli.commands.config_explain import run_explain

    return run_explain(config)


@app.command(context_settings=HELP)
def init(
    stage: Annotated[int, typer.Option("--stage", help="ZeRO stage: 0, 1, 2 or 3.")] = 2,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="File to write; default: stdout.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it exists.")] = False,
) -> int:
    """Write a configuration to start from.

    Examples: scale config init --stage 2; scale config init --stage 3 -o zero3.json
    """
    from polyscale_cli.commands.config_init import run_init

    return run_init(stage, output, force=force)
