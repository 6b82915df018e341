"""Rows of operators.

Notable: kernels are built when first used or ahead of it, never by the report, so a row says what there is, what could
be built, and what runs until then: the reference.
"""

from __future__ import annotations

from collections.abc import Sequence

from polyscale.errors import PluginError
from polyscale.interfaces.op import Kernel, KernelModule
from polyscale.ops import ModuleStatus, status
from polyscale.ops.libraries import Declared, declarations
from polyscale_cli.report.model import KernelRow, OpRow
from polyscale_cli.report.probing import Probe

REFERENCE, KERNELS, BROKEN = "reference", "kernels", "broken"


def op_rows(probes: Sequence[Probe]) -> list[OpRow]:
    """One row per operator of every library; a library that cannot be used is one row of its own."""
    broken: list[OpRow] = []
    libraries: list[Declared] = []
    for probe in probes:
        why = probe.why
        if not why:
            try:
                libraries.append(declarations(probe.entry, probe.made))
                continue
            except PluginError as error:
                why = error.why
        broken.append(OpRow(probe.entry.name, probe.entry.distribution, BROKEN, why=why))
    states: dict[KernelModule, ModuleStatus] = {}
    rows = []
    for library in libraries:
        for op in library.ops:
            found = [_kernel(kernel, other, states) for other in libraries for kernel in _named(other, op.name)]
            rows.append(OpRow(op.name, library.entry.distribution, KERNELS if found else REFERENCE, tuple(found)))
    return [*rows, *broken]


def _named(library: Declared, op: str) -> list[Kernel]:
    return [kernel for kernel in library.kernels if kernel.op == op]


def _kernel(kernel: Kernel, library: Declared, states: dict[KernelModule, ModuleStatus]) -> KernelRow:
    owner = library.entry.distribution
    try:
        module = library.module_of(kernel)
    except PluginError as error:
        return KernelRow(kernel.device_type, kernel.module, owner, "cannot build", error.why)
    if module not in states:
        states[module] = status(module)
    found = states[module]
    note = ". ".join(filter(None, (found.why, found.fix)))
    return KernelRow(kernel.device_type, module.name, owner, found.state, note)
