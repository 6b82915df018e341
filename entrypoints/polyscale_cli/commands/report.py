"""``scale report`` = ``scale-report``: what is installed, what works, what to do about what does not."""

from __future__ import annotations

import json
import sys

from polyscale_cli.boundary import OK
from polyscale_cli.commands.logs import logs_dropped
from polyscale_cli.commands.report_options import ReportOptions
from polyscale_cli.report.model import Report

UNMET = 1


def run_report(options: ReportOptions) -> int:
    """Print what ``options`` ask for; returns the exit code: 1 when a required plugin cannot be used."""
    if options.names:
        from polyscale_cli.report.listing import listing

        sys.stdout.writelines(f"{line}\n" for line in listing(options.kind))
        return OK
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
