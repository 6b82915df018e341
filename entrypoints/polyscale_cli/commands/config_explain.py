"""``scale config explain``."""

from __future__ import annotations

import json
import sys

from rich.markup import escape
from rich.table import Table

from polyscale.config import load_config
from polyscale.config.explain import Row, explain
from polyscale.config.section import Status
from polyscale_cli.commands.config_source import read_source
from polyscale_cli.commands.console import console


def run_explain(source: str) -> int:
    """Print every value of a configuration; returns the exit code. Where nobody looks on, a line for each value.

    Raises:
        PolyscaleError: the configuration cannot be used.
    """
    config = load_config(read_source(source))
    if not sys.stdout.isatty():
        sys.stdout.writelines("\t".join(columns(row)).rstrip() + "\n" for row in explain(config))
        return 0
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim", expand=True)
    table.add_column("key = value", overflow="fold", ratio=3)
    table.add_column("origin", no_wrap=True)
    table.add_column("differs, remarks", overflow="fold", ratio=1, min_width=16)
    for row in explain(config):
        style = "bold" if row.origin.kind != "default" else None
        table.add_row(*map(escape, columns(row)), style=style)
    console(sys.stdout).print(table)
    return 0


def columns(row: Row) -> tuple[str, str, str]:
    """``key = value``, where it comes from, and the remarks."""
    return f"{row.path} = {_text(row.value)}", row.origin.kind, remark(row)


def remark(row: Row) -> str:
    """What differs from DeepSpeed, how an "auto" was resolved, and why a key has no effect."""
    parts = [f"DeepSpeed: {_text(row.deepspeed_default)}" if row.differs else ""]
    if row.origin.kind in ("auto", "environment"):
        parts.append(row.origin.detail)
    if row.origin.kind != "default" and row.status != Status.HONOURED.value:
        parts.append(row.status)
    return "; ".join(filter(None, parts))


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)
