"""What a build needs beside compilers: ninja, the headers of Python, pybind11. Looked for, never run."""

from __future__ import annotations

import shutil
import sys
import sysconfig
from pathlib import Path

from polyscale.interfaces.op import KernelModule
from polyscale.ops.recipe import Recipe
from polyscale.ops.tools import missing, pybind11_folder


def prerequisites(recipe: Recipe) -> str:
    """See that everything is there; returns the path of ninja.

    Raises:
        ToolMissingError: something is not.
    """
    module = recipe.module
    ninja = find_ninja(module)
    include = Path(sysconfig.get_paths()["include"])
    if not (include / "Python.h").is_file():
        raise missing(
            module, f"Python's headers are not in {include}", "Install them (Debian: apt-get install python3-dev)"
        )
    if not module.torch_headers and pybind11_folder() is None and _includes_pybind11(recipe):
        raise missing(module, "pybind11 is not installed", "Run `pip install pybind11`")
    return ninja


def find_ninja(module: KernelModule) -> str:
    """Path of ninja: of the package of that name, else of the path.

    Raises:
        ToolMissingError: there is none.
    """
    program = "ninja.exe" if sys.platform == "win32" else "ninja"
    folders = []
    try:
        import ninja

        folders.append(str(ninja.BIN_DIR))
    except (ImportError, AttributeError):
        pass
    for found in (*(shutil.which(program, path=folder) for folder in folders), shutil.which(program)):
        if found:
            return found
    raise missing(module, "ninja is not installed", "Run `pip install ninja`")


def _includes_pybind11(recipe: Recipe) -> bool:
    texts = ((recipe.module.folder / name).read_text("utf-8", errors="replace") for name in recipe.digests)
    return any("pybind11/" in text for text in texts)
