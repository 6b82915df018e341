"""``scale build`` and ``scale clean``: kernels ahead of their first use, and rid of them."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Sequence

from rich.markup import escape
from rich.table import Table

from polyscale.errors import BuildError, PluginError, PolyscaleError, nearest
from polyscale.interfaces.op import KernelModule
from polyscale.ops import load_module, status
from polyscale.ops.cleaning import clean
from polyscale.ops.libraries import Declared, libraries
from polyscale.ops.loading import ensure_built
from polyscale.ops.tools import HOST, available
from polyscale_cli.boundary import OK
from polyscale_cli.commands.console import console
from polyscale_cli.commands.logs import logs_to_stderr

FAILED = 1


def run_build(names: Sequence[str], *, every: bool = False, force: bool = False) -> int:
    """Build modules; returns the exit code: 1 when one could not be built.

    Args:
        names: modules, ops, or libraries; none, without ``every``: print what there is.
        every: all that are for device types of this machine, but those that are built when named only.
        force: build although there is a build.

    Raises:
        PolyscaleError: there is nothing of a given name, or both names and ``every`` are given.
    """
    with logs_to_stderr():
        found = list(libraries())
        if every and names:
            raise PolyscaleError(f"{' '.join(names)} with --all", why="--all builds every module", fix="Leave one out")
        if not every and not names:
            return _list(found)
        modules = _here(found) if every else _named(found, names)
        return max([_build(module, force=force) for module in modules], default=OK)


def run_clean() -> int:
    """Remove what was built; returns the exit code.

    Raises:
        PolyscaleError: a module is being built now, or the cache cannot be written.
    """
    with logs_to_stderr():
        done = clean()
    what = f"Removed {', '.join(done.modules)}" if done.modules else "Nothing to remove"
    print(f"{what}: {done.bytes} bytes in {done.folder}")
    if done.busy:
        raise PolyscaleError(done.busy[0])
    return OK


def _build(module: KernelModule, *, force: bool) -> int:
    """Build one module and say how that went."""
    started = time.monotonic()
    before = status(module)
    label = f"{module.name} ({module.device_type})"
    try:
        if force or before.path is None:
            ensure_built(module, force=force)
            load_module(module)
            print(f"{label}: built in {time.monotonic() - started:.1f} s", flush=True)
        else:
            load_module(module)
            print(f"{label}: {before.state}", flush=True)
    except BuildError as error:
        sys.stdout.flush()
        print(f"{label}: {error}", file=sys.stderr)
        return FAILED
    return OK


def _here(found: Sequence[Declared]) -> list[KernelModule]:
    """Modules for device types of this machine that are built ahead."""
    chosen = []
    for module in (module for library in found for module in library.modules):
        if not module.ahead:
            print(f"{module.name} ({module.device_type}): only when named")
        elif module.device_type != HOST and not available(module.device_type):
            print(f"{module.name} ({module.device_type}): skipped, there is no such device here")
        else:
            chosen.append(module)
    return chosen


def _named(found: Sequence[Declared], names: Sequence[str]) -> list[KernelModule]:
    """Modules that ``names`` mean, each once."""
    table = _table(found)
    chosen: dict[KernelModule, None] = {}
    for name in names:
        if name not in table:
            near = nearest(name, table)
            hint = f"Did you mean {near!r}? " if near else ""
            raise PolyscaleError(
                f"No op or kernel module {name!r}", fix=f"{hint}There are: {', '.join(sorted(table)) or 'none'}"
            )
        if not table[name]:
            for library in found:
                for kernel in (kernel for kernel in library.kernels if kernel.op == name):
                    library.module_of(kernel)  # raises: why it has none
            raise PolyscaleError(f"Op {name!r}", why="it has no kernel: its PyTorch reference runs everywhere")
        chosen.update(dict.fromkeys(table[name]))
    return list(chosen)


def _table(found: Sequence[Declared]) -> dict[str, list[KernelModule]]:
    """Name -> modules: of a module, of a library, of an op (its kernels for device types of this machine, else all)."""
    table: dict[str, list[KernelModule]] = {op.name: [] for library in found for op in library.ops}
    for library in found:
        for kernel in library.kernels:
            modules = table.setdefault(kernel.op, [])
            with contextlib.suppress(PluginError):  # of a broken library; the op still has the kernels of others
                modules.append(library.module_of(kernel))
    for name, modules in table.items():
        usable = [module for module in modules if module.device_type == HOST or available(module.device_type)]
        table[name] = usable or modules
    for library in found:
        if library.modules:
            table[library.entry.name] = list(library.modules)
        for module in library.modules:
            table[module.name] = [module]
    return table


def _list(found: Sequence[Declared]) -> int:
    out = console(sys.stdout)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for column in ("module", "devices", "state"):
        table.add_column(column, no_wrap=True)
    table.add_column("ops", overflow="fold", ratio=1)
    for library in found:
        for module in library.modules:
            ops = sorted({kernel.op for kernel in library.kernels if kernel.module == module.name})
            table.add_row(*map(escape, (module.name, module.device_type, status(module).state, ", ".join(ops))))
    if not table.row_count:
        out.print("No kernel module is installed.")
        return OK
    out.print(table)
    out.print()
    out.print("Build one: scale build NAME")
    out.print("Build all for the devices of this machine: scale build --all")
    return OK
