"""Pickle that carries functions and classes of test modules to other processes.

Notable: pytest imports test files under names that no other process can import (``--import-mode=importlib``). So a
function or class travels as (module name, file, qualified name); the receiver imports the module by name where that
leads to the same file, and executes the file under the same name otherwise, once per version of the file.
"""

from __future__ import annotations

import importlib
import importlib.util
import io
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

MAIN = "__ranks_main__"


def dumps(value: Any) -> bytes:
    """Pickle ``value``; functions and classes may be of any file, but must be at the top level of it."""
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()


def loads(data: bytes) -> Any:
    """Undo :func:`dumps`, in another process or in this one."""
    return _Unpickler(io.BytesIO(data)).load()


def check_shippable(function: Callable[..., Any]) -> None:
    """Refuse what another process cannot find: lambdas, closures, methods, ``functools.partial`` objects.

    Raises:
        TypeError: ``function`` is not a function at the top level of a file.
    """
    if not isinstance(function, FunctionType) or "<" in function.__qualname__ or "." in function.__qualname__:
        raise TypeError(
            f"{function!r} cannot be run on ranks: it is not a function at the top level of a file. "
            "Move it to the top level of the test module, and give it what it needs as arguments."
        )


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> tuple[str, str, str] | None:
        if not isinstance(obj, FunctionType | type) or "<" in obj.__qualname__:
            return None
        module = sys.modules.get(obj.__module__)
        file = getattr(module, "__file__", None)
        if file is None or not file.endswith(".py"):
            return None
        name = MAIN if obj.__module__ == "__main__" else obj.__module__
        return name, str(Path(file).resolve()), obj.__qualname__


class _Unpickler(pickle.Unpickler):
    def persistent_load(self, pid: tuple[str, str, str]) -> Any:
        name, file, qualname = pid
        value: Any = module_of(name, Path(file))
        for attribute in qualname.split("."):
            value = getattr(value, attribute)
        return value


def module_of(name: str, file: Path) -> ModuleType:
    """Return the module ``name`` whose source is ``file``, importing or executing it when needed."""
    module = sys.modules.get("__main__" if name == MAIN and MAIN not in sys.modules else name)
    if module is not None and _same_file(module, file) and not _changed(module, file):
        return module
    if name != MAIN and module is None and _importable(name, file):
        return importlib.import_module(name)
    return _execute(name, file)


def _same_file(module: ModuleType, file: Path) -> bool:
    found = getattr(module, "__file__", None)
    return found is not None and Path(found).resolve() == file


def _changed(module: ModuleType, file: Path) -> bool:
    loaded = getattr(module, "__shipped_mtime__", None)
    return loaded is not None and loaded != file.stat().st_mtime_ns


def _importable(name: str, file: Path) -> bool:
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError, AttributeError):
        return False
    return spec is not None and spec.origin is not None and Path(spec.origin).resolve() == file


def _execute(name: str, file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot load {file}")
    module = importlib.util.module_from_spec(spec)
    module.__shipped_mtime__ = file.stat().st_mtime_ns  # type: ignore[attr-defined]
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
