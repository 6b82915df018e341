"""``scale report`` = ``scale-report``: what is installed, what works, what to do about what does not."""

from __future__ import annotations

import json
import sys

from polyscale.errors import PolyscaleError
from polyscale_cli.boundary import OK
from polyscale_cli.commands.logs import logs_dropped
from polyscale_cli.commands.report_options import ReportOptions
from polyscale_cli.report.model import Report

UNMET = 1


def run_report(options: ReportOptions) -> int:
    """Print what ``options`` ask for; returns the exit code: 1 when a required plugin cannot be used."""
    if options.names:
        return _names(options)
    from polyscale_cli.report.collect import collect

    for_people = not options.json and not options.require
    with logs_dropped():  # the rows say it all
        report = collect(options.kinds, system=for_people and options.kind is None)
    if options.json:
        from polyscale_cli.report.as_json import as_json

        print(json.dumps(as_json(report), indent=2))
    elif for_people:
        from polyscale_cli.commands.report_table import print_report

        print_report(report, sys.stdout)
    return _requirements(options, report)


def _names(options: ReportOptions) -> int:
    from polyscale_cli.report.listing import listing

    if options.require:
        raise PolyscaleError(
            f"--list with --require {options.require[0]}",
            why="--list imports nothing, so it cannot tell what can be used",
            fix="Leave --list out",
        )
    names = listing(options.kind)
    sys.stdout.write(json.dumps(names, indent=2) + "\n" if options.json else "".join(f"{name}\n" for name in names))
    return OK


def _requirements(options: ReportOptions, report: Report) -> int:
    from polyscale_cli.report.requirements import unmet

    code = OK
    for requirement in options.require:
        why = unmet(requirement, report)
        if why:
            code = UNMET
            print(f"{requirement} cannot be used: {why}", file=sys.stderr)
        elif not options.json:
            print(f"{requirement} can be used")
    return code
