"""Wheels with extensions: the real build backend, a real compiler, and the two places where packages lie."""

import json
import sys
import zipfile
from dataclasses import replace

import pytest
from flit_core import buildapi

from polyscale.interfaces.op import KernelModule, Source
from polyscale.ops import load_module
from polyscale.ops.wheel import with_extensions
from polyscale.testing.kernel_modules import find_compiler, fresh_name, write_module

PROJECT = """
[project]
name = "{name}"
version = "1.0"
description = "A module of kernels."
[project.entry-points."polyscale.op"]
{name} = "{name}:Plugin"
[tool.flit.module]
name = "{name}"
"""
PACKAGE = '''
"""A module of kernels."""
from pathlib import Path
from polyscale.hooks import hookimpl
from polyscale.interfaces.op import KernelModule, Source

class Plugin:
    interface_version = (1, 0)
    name = "{name}"
    @hookimpl
    def polyscale_op(self, context): return self
    def ops(self): return []
    def kernels(self): return []
    def modules(self):
        here = Path(__file__).parent
        source = Source("{module}.cpp")
        return [KernelModule("{module}", here / "kernels", "cpu", (source,), prebuilt=here / "prebuilt")]
'''


@pytest.mark.parametrize("layout", [".", "src"])
def test_the_extension_lies_in_the_package_wherever_that_is_in_the_project(tmp_path, monkeypatch, layout):
    find_compiler()
    monkeypatch.setenv("POLYSCALE_CACHE", str(tmp_path / "cache"))
    name, project = f"acme_{fresh_name()}", tmp_path / "project"
    module = write_module(project / layout / name / "kernels", value=8)
    (project / layout / name / "__init__.py").write_text(PACKAGE.format(name=name, module=module.name))
    (project / "pyproject.toml").write_text(PROJECT.format(name=name))
    (tmp_path / "out").mkdir()
    monkeypatch.chdir(project)
    path = list(sys.path)
    made = with_extensions(buildapi.build_wheel(str(tmp_path / "out")), str(tmp_path / "out"))
    assert sys.path == path
    assert [wheel.name for wheel in (tmp_path / "out").iterdir()] == [made]
    with zipfile.ZipFile(tmp_path / "out" / made) as wheel:
        wheel.extractall(tmp_path / "site")
    installed = tmp_path / "site" / name
    record = json.loads((installed / "prebuilt" / f"{module.name}.json").read_text())
    assert (installed / "prebuilt" / record["file"]).is_file()
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("POLYSCALE_CACHE", str(tmp_path / "empty"))
    found = KernelModule(module.name, installed / "kernels", "cpu", (Source(f"{module.name}.cpp"),))
    assert load_module(replace(found, prebuilt=installed / "prebuilt")).value() == 8
    assert not (tmp_path / "empty").exists()
