"""The report for people: one table per kind, the machine, and what to do next.

Notable: readable at 80 columns; long reasons wrap in the last column; colour only on a terminal (rich decides).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TextIO

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from polyscale.kinds import KINDS
from polyscale_cli.commands.console import console
from polyscale_cli.report.model import Fact, OpRow, PluginRow, Report
from polyscale_cli.report.verified import NEVER

_NEXT = "Next: scale run train.py"


def print_report(report: Report, stream: TextIO) -> None:
    """Print ``report`` on ``stream``."""
    out = console(stream)
    out.print(f"polyscale {report.polyscale}, Python {report.python}, torch {report.torch.version or 'none'}")
    for kind, rows in report.plugins.items():
        _print(out, KINDS[kind].plural, _plugins(rows, torch_error=report.torch.error))
    if report.ops is not None:
        _print(out, "ops", _ops(report.ops))
    if report.system:
        _print(out, "machine", _facts(report.system))
    out.print()
    out.print(escape(closing_line(report)))


def closing_line(report: Report) -> str:
    """What would be chosen and what to type next, or what stands in the way."""
    return f"{report.choice} {_NEXT}" if report.ready else report.choice


def _print(out: Console, title: str, table: Table | None) -> None:
    out.print()
    out.print(f"[bold]{title}[/bold]")
    out.print("  none installed" if table is None else table)


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), show_header=True, header_style="dim")
    table.add_column("", width=1)
    for column in columns[:-1]:
        table.add_column(column, no_wrap=True)
    table.add_column(columns[-1], overflow="fold", ratio=1)
    return table


def _plugins(rows: Sequence[PluginRow], *, torch_error: str) -> Table | None:
    if not rows:
        return None
    table = _table("name", "package", "api", "status", "note")
    for row in rows:
        package = f"{row.distribution.removeprefix('polyscale-')} {row.version}"
        note = "torch cannot be imported (see below)" if torch_error and row.why == torch_error else row.why
        if not note and row.verified != NEVER:
            note = f"verified on {row.verified}"
        table.add_row("", *map(escape, (row.name, package, row.interface or "?")), _status(row), escape(note))
    return table


def _status(row: PluginRow) -> str:
    if row.selected:
        return "[bold green]chosen[/bold green]"
    return "[green]usable[/green]" if row.available else "[yellow]no[/yellow]"


def _ops(rows: Sequence[OpRow]) -> Table | None:
    if not rows:
        return None
    table = _table("name", "package", "devices", "status", "note")
    for row in rows:
        table.add_row("", *map(escape, (row.name, _short(row.owner), "any", row.status, row.why)))
        for kernel in row.kernels:
            state = escape(kernel.state)
            colour = "green" if kernel.state in ("prebuilt", "built") else "yellow"
            named = map(escape, (f"  {kernel.module}", _short(kernel.owner), kernel.device_type))
            table.add_row("", *named, f"[{colour}]{state}[/{colour}]", escape(kernel.note))
    return table


def _short(distribution: str) -> str:
    return distribution.removeprefix("polyscale-")


def _facts(facts: Iterable[Fact]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), show_header=False)
    table.add_column("", width=1)
    table.add_column("name", no_wrap=True)
    table.add_column("value", overflow="fold", ratio=1)
    for fact in facts:
        value = escape(f"{fact.value}. {fact.fix}" if fact.fix else fact.value)
        table.add_row("", escape(fact.name), value if fact.ok else f"[yellow]{value}[/yellow]")
    return table
