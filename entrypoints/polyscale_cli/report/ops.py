"""Rows of operators.

Notable: kernels are built when first used or ahead of it, never by the report, so a row says what there is to build.
"""

from __future__ import annotations

from collections.abc import Sequence

from polyscale.discovery.quiet import run_plugin_code
from polyscale.errors import PluginError
from polyscale_cli.report.model import OpRow
from polyscale_cli.report.probing import Probe


def op_rows(probes: Sequence[Probe]) -> list[OpRow]:
    """One row per operator of every library; a library that cannot be used is one row of its own."""
    return [row for probe in probes for row in _rows(probe)]


def _rows(probe: Probe) -> list[OpRow]:
    entry = probe.entry
    if probe.why:
        return [OpRow(entry.name, entry.distribution, (), "broken", probe.why)]
    try:
        return run_plugin_code(entry.label, "listing its ops", lambda: _of(probe), fix="")
    except PluginError as error:
        return [OpRow(entry.name, entry.distribution, (), "broken", error.why)]


def _of(probe: Probe) -> list[OpRow]:
    rows = []
    for op in probe.made.ops():
        devices = tuple(sorted({kernel.device_type for kernel in op.kernels}))
        rows.append(OpRow(op.name, probe.entry.distribution, devices, "kernels" if devices else "reference"))
    return rows
