"""The report for programs: a stable set of keys."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from polyscale.kinds import KINDS
from polyscale_cli.report.kinds import OP
from polyscale_cli.report.model import OpRow, PluginRow, Report

_PLUGIN_KEYS = ("name", "distribution", "version", "available", "why", "selected", "verified")


def as_json(report: Report) -> dict[str, Any]:
    """Versions of ``polyscale``, ``python`` and ``torch`` (None where it cannot be imported), and a list per kind."""
    lists: dict[str, Any] = {KINDS[kind].plural: list(map(_plugin, rows)) for kind, rows in report.plugins.items()}
    if report.ops is not None:
        lists[KINDS[OP].plural] = list(map(_op, report.ops))
    return {"polyscale": report.polyscale, "python": report.python, "torch": report.torch.version, **lists}


def _plugin(row: PluginRow) -> dict[str, Any]:
    return {key: getattr(row, key) for key in _PLUGIN_KEYS}


def _op(row: OpRow) -> dict[str, Any]:
    return {
        "name": row.name,
        "owner": row.owner,
        "device_types": row.device_types,
        "status": row.status,
        "kernels": list(map(asdict, row.kernels)),
        "why": row.why,
    }
