"""What a build is made from, and the keys under which it is found again.

Notable: two keys. The *source key* covers what decides what an extension does and where it can be loaded: sources,
headers, flags, Python's ABI, the machine. The *build key* adds the compilers, where their environment has them search,
and pybind11. A build is looked for under the build key; where a tool is missing, and in a wheel, one with the same
source key will do.
"""

from __future__ import annotations

import hashlib
import json
import platform
import sys
import sysconfig
from dataclasses import dataclass
from typing import Any

from polyscale import env
from polyscale.errors import BuildError
from polyscale.interfaces.op import KernelModule, Source
from polyscale.ops import tools
from polyscale.ops.tools import Tools

_LENGTH = 24
_VERSION = 1  # of how files are compiled here; a change makes every key another


@dataclass(frozen=True)
class Recipe:
    """A module as it would be built here.

    Attributes:
        module: the module.
        sources: those of its sources that are for this machine.
        digests: file below the module's folder -> SHA-256, headers included.
        source_key: see above.
    """

    module: KernelModule
    sources: tuple[Source, ...]
    digests: dict[str, str]
    source_key: str

    @property
    def file(self) -> str:
        """Name of the extension's file."""
        return extension_file(self.module)

    @property
    def with_device(self) -> bool:
        """Whether some source is for the compiler of the device type."""
        return any(not for_host(source) for source in self.sources)

    def tools(self) -> Tools:
        """The compilers.

        Raises:
            ToolMissingError: there is none.
        """
        return tools.find_tools(self.module, with_device=self.with_device)

    def build_key(self, found: Tools) -> str:
        """The key of a build by these compilers."""
        return _digest([self.source_key, found.identities(), tools.pybind11_version(), *env.compiler_search()])


def recipe(module: KernelModule) -> Recipe:
    """Read the files of ``module`` and make its source key.

    Raises:
        BuildError: a file is missing, or there is nothing for this machine.
    """
    machine = platform.machine().lower()
    sources = tuple(source for source in module.sources if not source.machines or machine in source.machines)
    if not sources:
        why = f"it has no source for this machine ({machine})"
        raise BuildError(f"Kernel module {module.name!r}", why=why)
    digests = {name: _file_digest(module, name) for name in _files(module, sources)}
    facts: dict[str, Any] = {
        "version": _VERSION,
        "name": module.name,
        "files": digests,
        "sources": [[source.path, list(source.flags)] for source in sources],
        "flags": [list(module.flags), list(module.link_flags)],
        "python": sysconfig.get_config_var("EXT_SUFFIX"),
        "machine": [sys.platform, machine],
        "torch": torch_abi() if module.torch_headers else "",
    }
    return Recipe(module, sources, digests, _digest(facts))


def for_host(source: Source) -> bool:
    """Whether the host's compiler compiles it."""
    return source.path.endswith(".cpp")


def extension_file(module: KernelModule, mark: str = "") -> str:
    """Name of the file of an extension for this Python; ``mark`` tells builds apart."""
    return f"{module.name}{'.' if mark else ''}{mark}{sysconfig.get_config_var('EXT_SUFFIX')}"


def torch_abi() -> str:
    """Version of torch and C++ ABI, for modules that include its headers."""
    import torch

    return f"{torch.__version__} {torch.version.git_version} {int(torch.compiled_with_cxx11_abi())}"


def _files(module: KernelModule, sources: tuple[Source, ...]) -> list[str]:
    """Names of sources and headers below the folder, sorted."""
    names = {source.path for source in sources}
    for pattern in module.headers:
        names |= {path.relative_to(module.folder).as_posix() for path in module.folder.glob(pattern) if path.is_file()}
    return sorted(names)


def _file_digest(module: KernelModule, name: str) -> str:
    try:
        return hashlib.sha256((module.folder / name).read_bytes()).hexdigest()
    except OSError as error:
        why = f"{module.folder / name} cannot be read: {error.strerror or error}"
        raise BuildError(f"Kernel module {module.name!r}", why=why, fix="Reinstall the package it is from") from error


def _digest(facts: Any) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:_LENGTH]
