"""Kernel modules small enough for tests: real C++ against Python's own C interface, compiled in half a second.

Notable: no pybind11, whose headers take many times as long to compile as all else. Each module has a name of its own,
since a process keeps what it has imported.
"""

from __future__ import annotations

import itertools
import os
import shutil
import stat
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from polyscale.interfaces.op import KernelModule, Source
from polyscale.testing.distributions import write_distribution

_NUMBERS = itertools.count()
_SOURCE = """
#include <Python.h>
#include "value.h"
{extra}
static PyObject* value(PyObject*, PyObject*) {{ return PyLong_FromLong(VALUE); }}

/* Multiplies n floats at an address by a factor, and by VALUE. */
static PyObject* scale(PyObject*, PyObject* args) {{
    unsigned long long address; Py_ssize_t n; double factor;
    if (!PyArg_ParseTuple(args, "Knd", &address, &n, &factor)) return nullptr;
    float* data = reinterpret_cast<float*>(address);
    for (Py_ssize_t i = 0; i < n; i++) data[i] = static_cast<float>(data[i] * factor * VALUE);
    Py_RETURN_NONE;
}}

static PyMethodDef methods[] = {{
    {{"value", value, METH_NOARGS, ""}}, {{"scale", scale, METH_VARARGS, ""}}, {{nullptr, nullptr, 0, nullptr}}
}};
static PyModuleDef definition = {{PyModuleDef_HEAD_INIT, "{name}", "", -1, methods}};
PyMODINIT_FUNC PyInit_{name}() {{ return PyModule_Create(&definition); }}
"""
_LIBRARY = """
from pathlib import Path

from polyscale.hooks import hookimpl
from polyscale.interfaces.op import Kernel, KernelModule, Op, Source

MODULE = KernelModule("{module}", Path({folder!r}), "cpu", (Source("{module}.cpp"),))


def reference(x, factor):
    x.mul_(factor)


def implementation(extension):
    def kernel(x, factor):
        assert x.is_contiguous() and str(x.dtype) == "torch.float32"
        extension.scale(x.data_ptr(), x.numel(), factor)

    return kernel


class Library:
    name = "{module}"

    def ops(self):
        return [Op("{op}", "(Tensor(a!) x, float factor) -> ()", reference)]

    def modules(self):
        return [MODULE]

    def kernels(self):
        return [Kernel("{op}", "cpu", "{module}", implementation)]


class Plugin:
    interface_version = (1, 0)

    @hookimpl
    def polyscale_op(self, context):
        return Library()
"""


def fresh_name() -> str:
    """A name that no module of this process has had."""
    return f"tiny_{os.getpid()}_{next(_NUMBERS)}"


def write_module(
    folder: Path, *, name: str | None = None, value: int = 1, extra: str = "", **fields: Any
) -> KernelModule:
    """Write the sources of a module with ``value()`` and ``scale(address, n, factor)``.

    Args:
        folder: where to; made if absent.
        name: of the module; None: a fresh one.
        value: what ``value()`` returns, and ``scale`` multiplies by.
        extra: C++ text before its functions.
        fields: of ``KernelModule``.
    """
    name = name or fresh_name()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.cpp").write_text(_SOURCE.format(name=name, extra=extra))
    (folder / "value.h").write_text(f"#define VALUE {value}\n")
    return replace(KernelModule(name, folder, "cpu", (Source(f"{name}.cpp"),)), **fields)


def write_op_library(folder: Path, module: KernelModule, op: str, *, dist: str = "acme-ops") -> Path:
    """Write a distribution with one op, ``op(Tensor(a!) x, float factor)``, whose kernel for the CPU is in ``module``.

    The reference multiplies by the factor alone, so a module of another ``value`` than 1 shows which of them ran.

    Returns:
        The folder that is to be put on ``sys.path``.
    """
    source = _LIBRARY.format(module=module.name, folder=str(module.folder), op=op)
    package = f"acme_{module.name}"
    entry_points: Mapping[str, Mapping[str, str]] = {"polyscale.op": {module.name: f"{package}:Plugin"}}
    return write_distribution(folder, dist, entry_points=entry_points, modules={package: source})


def write_compiler(path: Path, *commands: str) -> Path:
    """Write a compiler that runs shell ``commands`` before the real one; ``CXX`` can name it. Linking is left alone."""
    real = find_compiler()
    lines = ["#!/bin/sh", 'case " $* " in *" -c "*)', *commands, ";; esac", f'exec {real} "$@"']
    path.write_text("\n".join(lines) + "\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def find_compiler(names: Sequence[str] = ("c++", "g++", "clang++")) -> str:
    """Path of the host's C++ compiler. Where there is none the test is skipped; under ``CI=true`` it fails."""
    import pytest

    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        if os.environ.get("CI") == "true":
            pytest.fail("no C++ compiler on a machine of continuous integration")
        pytest.skip("no C++ compiler: install g++ or clang++")
    return found
