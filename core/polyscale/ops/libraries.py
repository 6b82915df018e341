"""What the installed op libraries declare. Loading them builds nothing; a broken one hides no other."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

from polyscale.discovery import Installed, installed, load
from polyscale.discovery.quiet import run_plugin_code
from polyscale.errors import PluginError, PolyscaleError, nearest
from polyscale.interfaces.op import Kernel, KernelModule, Op, OpLibrary

logger = logging.getLogger("polyscale")
KIND = "op"
T = TypeVar("T")


@dataclass(frozen=True)
class Declared:
    """What one library declares.

    Attributes:
        entry: its entry point.
        ops, modules, kernels: see ``OpLibrary``.
    """

    entry: Installed
    ops: tuple[Op, ...]
    modules: tuple[KernelModule, ...]
    kernels: tuple[Kernel, ...]

    def module_of(self, kernel: Kernel) -> KernelModule:
        """The module that has ``kernel``.

        Raises:
            PluginError: the library declares no such module.
        """
        for module in self.modules:
            if module.name == kernel.module:
                return module
        known = ", ".join(module.name for module in self.modules) or "none"
        raise PluginError(
            self.entry.label,
            why=f"Its kernel of op {kernel.op!r} for {kernel.device_type} names the module {kernel.module!r}",
            fix=f"Modules that it declares: {known}",
        )


@lru_cache(maxsize=64)
def declared(entry: Installed) -> Declared:
    """What an installed library declares; asked once per process.

    Raises:
        PluginError: it is broken, or two distributions claim its name.
    """
    return declarations(entry, load(KIND, entry.name))


def declarations(entry: Installed, library: OpLibrary) -> Declared:
    """What ``library`` declares.

    Raises:
        PluginError: one of its methods raises.
    """

    def ask(what: str, call: Callable[[], T]) -> T:
        return run_plugin_code(entry.label, f"Calling its {what}()", call, fix="")

    return Declared(
        entry,
        ask("ops", lambda: tuple(library.ops())),
        ask("modules", lambda: tuple(library.modules())),
        ask("kernels", lambda: tuple(library.kernels())),
    )


def libraries() -> Iterator[Declared]:
    """What every installed library declares, by name; a broken one is left out, said once as a warning."""
    for entry in {entry.name: entry for entry in installed(KIND)}.values():
        try:
            yield declared(entry)
        except PolyscaleError as error:
            _say_once(str(error))


def modules() -> list[KernelModule]:
    """Every module of every installed library; builds and imports none."""
    return [module for library in libraries() for module in library.modules]


def find_op(name: str) -> tuple[Op, Declared]:
    """The op called ``name`` and the library that declares it.

    Raises:
        PluginError: none does, or two do.
    """
    every = list(libraries())
    found = [(op, library) for library in every for op in library.ops if op.name == name]
    if len(found) == 1:
        return found[0]
    if found:
        owners = " and ".join(f"{library.entry.distribution} {library.entry.version}" for _, library in found)
        raise PluginError(f"Op {name!r}", why=f"Several distributions declare it: {owners}", fix="Keep one of them")
    names = sorted(op.name for library in every for op in library.ops)
    near = nearest(name, names)
    hint = f"Did you mean {near!r}? " if near else ""
    raise PluginError(f"No op {name!r}", fix=f"{hint}Installed: {', '.join(names) or 'none'}")


def kernels_for(name: str, device_type: str) -> list[tuple[Kernel, Declared]]:
    """Kernels of op ``name`` for ``device_type``, of all libraries; those of the op's own owner are not preferred."""
    return [
        (kernel, library)
        for library in libraries()
        for kernel in library.kernels
        if (kernel.op, kernel.device_type) == (name, device_type)
    ]


@lru_cache(maxsize=64)
def _say_once(message: str) -> None:
    logger.warning("%s", message)
