"""The tree of commands, their options and their help."""

from __future__ import annotations

from typing import Annotated

import typer

import polyscale
from polyscale_cli.commands import config as config_commands
from polyscale_cli.commands import new as new_commands
from polyscale_cli.commands.group import HELP, Commands
from polyscale_cli.commands.report_options import ReportOptions

app = typer.Typer(
    cls=Commands,
    help="Train models that do not fit one device, on whatever devices are installed.\n\n"
    "Examples: scale report; scale config init --stage 2 -o zero2.json; scale run --nproc 2 train.py zero2.json",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    context_settings=HELP,
)
app.add_typer(config_commands.app, name="config")
app.add_typer(new_commands.app, name="new")


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"polyscale {polyscale.__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and end.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of unexpected errors.")] = False,
) -> None:
    """Options before the command; ``--debug`` is taken out by ``main`` and stands here for the help."""


@app.command(context_settings=HELP)
def report(
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    kind: Annotated[str | None, typer.Option("--kind", metavar="K", help="Only this kind: accelerator, ...")] = None,
    names: Annotated[bool, typer.Option("--list", help="Only names, from metadata; imports nothing.")] = False,
    require: Annotated[
        list[str] | None,
        typer.Option("--require", metavar="KIND=NAME", help="Exit with 1 when it cannot be used; repeatable."),
    ] = None,
) -> int:
    """What is installed, what works, and what to do about what does not.

    Examples: scale report; scale report --kind accelerator; scale report --json; scale report --require accelerator=cpu
    """
    from polyscale_cli.commands.report import run_report
    from polyscale_cli.report.kinds import parse_kind
    from polyscale_cli.report.requirements import parse_requirement

    return run_report(
        ReportOptions(
            json=json,
            names=names,
            kind=parse_kind(kind) if kind is not None else None,
            require=tuple(map(parse_requirement, require or ())),
        )
    )


@app.command(context_settings={**HELP, "allow_interspersed_args": False})
def run(
    target: Annotated[str, typer.Argument(metavar="SCRIPT", help="Script to run, or module with -m.")],
    arguments: Annotated[list[str] | None, typer.Argument(metavar="ARGS", help="Given to it untouched.")] = None,
    nproc: Annotated[
        int | None, typer.Option("--nproc", "-n", help="Ranks; default: one per device, on cpu 1.", show_default=False)
    ] = None,
    module: Annotated[bool, typer.Option("-m", "--module", help="SCRIPT is the name of a module.")] = False,
    log_dir: Annotated[str | None, typer.Option("--log-dir", help="Folder for a file per rank and stream.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the command of each rank, start nothing.")] = False,
) -> int:
    """Run a script on several ranks of this host.

    Lines are prefixed with [rank N]. The exit code is that of the first rank that fails, 130 after Ctrl-C.

    Examples: scale run train.py; scale run --nproc 2 train.py --steps 100; scale run --nproc 2 -m package.train
    """
    from polyscale_cli.commands.run import run_ranks

    return run_ranks(target, arguments or [], module=module, nproc=nproc, log_dir=log_dir, dry_run=dry_run)


@app.command(context_settings=HELP)
def build(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="NAME", help="An op, or a kernel module; none: list what there is.")
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="All for the device types of this machine.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Build although there is a build.")] = False,
) -> int:
    """Build kernels ahead of their first use. Exit code 1 when one could not be built.

    They are kept in the folder that POLYSCALE_CACHE names, else in the user's cache folder.

    Examples: scale build; scale build --all; scale build cpu_ops --force
    """
    from polyscale_cli.commands.build import run_build

    return run_build(names or [], every=every, force=force)


@app.command(context_settings=HELP)
def clean() -> int:
    """Remove built kernels; they are built again when they are next needed.

    Example: scale clean
    """
    from polyscale_cli.commands.build import run_clean

    return run_clean()
