"""Putting the report together.

Notable: programs are asked for their versions while torch is being imported, which is most of the time it takes.
"""

from __future__ import annotations

import platform
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor

import polyscale
from polyscale.discovery import installed
from polyscale.discovery.quiet import run_plugin_code
from polyscale.errors import PluginError
from polyscale.kinds import KINDS
from polyscale_cli.report.kinds import OP
from polyscale_cli.report.model import Fact, PluginRow, Report
from polyscale_cli.report.ops import op_rows
from polyscale_cli.report.probing import Probe, probe
from polyscale_cli.report.selection import Selection, select
from polyscale_cli.report.system import system_facts
from polyscale_cli.report.torch_facts import torch_facts
from polyscale_cli.report.verified import verified


def collect(kinds: Collection[str] | None = None, *, system: bool = False) -> Report:
    """Find out everything, or what belongs to some kinds.

    Args:
        kinds: kinds of plugin; None: all.
        system: whether facts about the machine are wanted too.
    """
    wanted = [kind for kind in KINDS if kinds is None or kind in kinds]
    with ThreadPoolExecutor(max_workers=1) as pool:
        facts = pool.submit(system_facts) if system else None
        torch = torch_facts()
        probes = {kind: [probe(entry, torch) for entry in installed(kind)] for kind in wanted}
        selection = select(probes, torch_error=torch.error)
        found = facts.result() if facts is not None else []
    return Report(
        polyscale=polyscale.__version__,
        python=platform.python_version(),
        torch=torch,
        plugins={kind: [_row(one, selection) for one in probes[kind]] for kind in wanted if kind != OP},
        ops=op_rows(probes[OP]) if OP in wanted else None,
        ready=selection.accelerator is not None,
        choice=selection.said,
        system=[*found, *toolkits(probes.get("accelerator", ()))] if system else [],
    )


def toolkits(probes: Sequence[Probe]) -> list[Fact]:
    """What each accelerator says of its driver, toolkit and compiler."""
    facts = []
    for one in probes:
        if one.made is None:
            continue
        try:
            findings = run_plugin_code(one.entry.label, "diagnosing", one.made.diagnose, fix="")
        except PluginError as error:
            facts.append(Fact(one.entry.name, "unknown", ok=False, fix=error.why))
            continue
        facts += [Fact(f"{one.entry.name}: {each.name}", each.value, each.ok, each.fix) for each in findings]
    return facts


def _row(one: Probe, selection: Selection) -> PluginRow:
    entry = one.entry
    return PluginRow(
        kind=entry.kind,
        name=entry.name,
        distribution=entry.distribution,
        version=entry.version,
        interface=one.interface,
        available=not one.why,
        why=one.why,
        selected=not one.why and selection.names.get(entry.kind) == entry.name,
        verified=verified(entry.kind, entry.name, entry.value),
    )
