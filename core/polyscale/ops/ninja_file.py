"""The file that tells ninja what to run: one edge per source, one for the link.

Notable: commands are written out, since every source has flags of its own; a build starts in an empty folder, so there
is nothing for ninja to compare and no dependency to record.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from polyscale.interfaces.op import KernelModule, Source
from polyscale.ops.recipe import Recipe, for_host
from polyscale.ops.tools import Tools, pybind11_folder

_HOST_FLAGS = ("-fvisibility=hidden",)


def ninja_file(recipe: Recipe, tools: Tools) -> str:
    """Text of ``build.ninja`` for a build in the folder in which it lies."""
    lines = ["rule run", "  command = $command", "  description = $what", ""]
    objects = []
    for number, source in enumerate(recipe.sources):
        objects.append(f"{number}.o")
        lines += _edge(objects[-1], [], f"compile {source.path}", _compile(recipe, tools, source, objects[-1]))
    lines += _edge(recipe.file, objects, f"link {recipe.file}", _link(recipe, tools, objects))
    return "\n".join(lines) + "\n"


def _compile(recipe: Recipe, tools: Tools, source: Source, target: str) -> list[str]:
    module = recipe.module
    host = for_host(source)
    chain = tools.host if host else tools.linker
    command = [chain.compiler, *chain.flags, *(_HOST_FLAGS if host else ())]
    command += [f"-I{folder}" for folder in _include_folders(module)]
    command += [*_torch_defines(module), *module.flags, *source.flags]
    return [*command, "-c", str(module.folder / source.path), "-o", target]


def _link(recipe: Recipe, tools: Tools, objects: Sequence[str]) -> list[str]:
    chain, module = tools.linker, recipe.module
    shared = ["-bundle", "-undefined", "dynamic_lookup"] if sys.platform == "darwin" else ["-shared"]
    command = [chain.compiler, *chain.flags, *shared, *objects, "-o", recipe.file]
    return [*command, *_torch_libraries(module), *module.link_flags]


def _include_folders(module: KernelModule) -> list[str]:
    folders = [str(module.folder), sysconfig.get_paths()["include"]]
    if (pybind11 := pybind11_folder()) is not None and not module.torch_headers:  # torch brings its own
        folders.append(str(pybind11))
    if module.torch_headers:
        include = _torch_folder() / "include"
        folders += [str(include), str(include / "torch" / "csrc" / "api" / "include")]
    return folders


def _torch_defines(module: KernelModule) -> list[str]:
    if not module.torch_headers:
        return []
    import torch

    abi = int(torch.compiled_with_cxx11_abi())
    return [
        f"-DTORCH_EXTENSION_NAME={module.name}",
        "-DTORCH_API_INCLUDE_EXTENSION_H",
        f"-D_GLIBCXX_USE_CXX11_ABI={abi}",
    ]


def _torch_libraries(module: KernelModule) -> list[str]:
    """Libraries of torch, which is imported before the extension, so no path to them is in the file."""
    if not module.torch_headers:
        return []
    return [f"-L{_torch_folder() / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"]


def _torch_folder() -> Path:
    import torch

    return Path(torch.__file__).parent


def _edge(target: str, inputs: Sequence[str], what: str, command: Sequence[str]) -> list[str]:
    shell = subprocess.list2cmdline(command) if sys.platform == "win32" else shlex.join(command)
    return [
        f"build {target}: run {' '.join(inputs)}".rstrip(),
        f"  command = {_escaped(shell)}",
        f"  what = {_escaped(what)}",
        "",
    ]


def _escaped(text: str) -> str:
    return text.replace("$", "$$")
