"""Builds that are damaged or foreign are never loaded, and are made anew; a build in a wheel comes first."""

import json
import shutil
import subprocess
import sys
import textwrap
from dataclasses import asdict, replace

import pytest

from polyscale.errors import BuildError
from polyscale.ops import load_module, status
from polyscale.ops.cache import measure
from polyscale.ops.loading import ensure_built
from polyscale.testing.kernel_modules import find_compiler, write_compiler, write_module


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    find_compiler()
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("POLYSCALE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def built_once(tmp_path_factory):
    """A module, and the cache in which it is built."""
    folder = tmp_path_factory.mktemp("once")
    find_compiler()
    module = write_module(folder / "source", value=5)
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("CXX", raising=False)
        patch.setenv("POLYSCALE_CACHE", str(folder / "cache"))
        ensure_built(module)
    return module, folder / "cache"


@pytest.fixture
def whole(built_once, cache):
    """A module of which a copy of a build lies in the cache of this test."""
    module, built = built_once
    shutil.copytree(built, cache)
    return module


def load_elsewhere(module):
    """Load a module in a process of its own, which a bad file may kill; returns what it logged."""
    code = f"""
        import logging, sys
        from pathlib import Path
        from polyscale.interfaces.op import KernelModule, Source
        from polyscale.ops import load_module
        logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
        name, folder = {module.name!r}, Path({str(module.folder)!r})
        module = KernelModule(name, folder, "cpu", (Source(name + ".cpp"),))
        print(load_module(module).value())
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    *logged, value = done.stdout.splitlines()
    assert value == "5"
    return "\n".join(logged)


def rewrite_record(built, **changes):
    record = built.path.parent / "build.json"
    record.write_text(json.dumps({**json.loads(record.read_text()), **changes}))


def truncate(built):
    with built.path.open("r+b") as file:
        file.truncate(built.path.stat().st_size // 2)


def change_one_byte(built):
    data = bytearray(built.path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    built.path.write_bytes(data)


@pytest.mark.parametrize(
    "damage",
    [
        truncate,
        change_one_byte,
        lambda built: built.path.write_bytes(b"no extension at all"),
        lambda built: built.path.write_bytes(b""),
        lambda built: built.path.unlink(),
        lambda built: (built.path.parent / "build.json").write_text("{"),
        lambda built: (built.path.parent / "build.json").write_text("[1]"),
        lambda built: (built.path.parent / "build.json").write_text("[" * 100_000),
        lambda built: ((record := built.path.parent / "build.json").unlink(), record.mkdir(), (record / "x").touch()),
        lambda built: rewrite_record(built, file=5),
        lambda built: (built.path.parent / "build.json").unlink(),
        lambda built: rewrite_record(built, source_key="another"),
    ],
    ids=[
        "truncated",
        "one byte",
        "garbage",
        "empty",
        "gone",
        "record cut",
        "record odd",
        "record deep",
        "record a folder",
        "file odd",
        "record gone",
        "other key",
    ],
)
def test_a_damaged_build_is_built_anew(whole, damage):
    damage(ensure_built(whole))
    assert status(whole).state == "not built"
    assert f"Building kernel module {whole.name}" in load_elsewhere(whole)
    assert "Building" not in load_elsewhere(whole)


def test_a_whole_file_that_cannot_be_imported_is_built_anew(tmp_path):
    """As one from another Python, or for a newer C library: it is as its record says, and does not load."""
    module = write_module(tmp_path / "source", value=5)
    built = ensure_built(module)
    foreign = tmp_path / "foreign.cpp"
    foreign.write_text("int not_a_python_extension;\n")
    subprocess.run([find_compiler(), "-shared", "-fPIC", str(foreign), "-o", str(built.path)], check=True, timeout=60)
    size, sha256 = measure(built.path)
    rewrite_record(built, size=size, sha256=sha256)
    assert status(module).state == "built"
    logged = load_elsewhere(module)
    assert "cannot be imported" in logged and f"Building kernel module {module.name}" in logged
    assert "Building" not in load_elsewhere(module)


def test_a_record_of_a_later_version_with_more_in_it_is_read(whole):
    rewrite_record(ensure_built(whole), added_later=[1, 2])
    assert status(whole).state == "built"


def prebuild(module, folder):
    """Put a build where a wheel has it."""
    built = ensure_built(module)
    folder.mkdir()
    shutil.copy(built.path, folder)
    (folder / f"{module.name}.json").write_text(json.dumps(asdict(built.record)))
    shutil.rmtree(built.path.parent)
    return replace(module, prebuilt=folder)


def test_a_build_of_the_wheel_comes_first_whatever_the_compiler(tmp_path, monkeypatch, caplog):
    module = prebuild(write_module(tmp_path / "source", value=5), tmp_path / "prebuilt")
    monkeypatch.setenv("CXX", str(write_compiler(tmp_path / "another-c++", "exit 1")))
    caplog.clear()
    assert status(module).state == "prebuilt"
    assert load_module(module).value() == 5
    assert not caplog.records


def test_a_build_of_the_wheel_for_other_sources_is_passed_over(tmp_path):
    module = prebuild(write_module(tmp_path / "source", value=5), tmp_path / "prebuilt")
    (module.folder / "value.h").write_text("#define VALUE 6\n")
    assert status(module).state == "not built"
    assert load_module(module).value() == 6


def test_a_damaged_build_of_the_wheel_is_passed_over(tmp_path):
    module = prebuild(write_module(tmp_path / "source", value=5), tmp_path / "prebuilt")
    extension = next(path for path in module.prebuilt.iterdir() if path.suffix != ".json")
    extension.write_bytes(extension.read_bytes()[:-100])
    assert status(module).state == "not built"
    assert load_module(module).value() == 5


def test_what_cannot_be_removed_from_the_cache_hinders_no_build(tmp_path):
    """As a file that another process has mapped, on a file system of the network."""
    module = write_module(tmp_path / "source", value=5)
    built = ensure_built(module)
    (built.path.parent / "left").mkdir()
    assert ensure_built(module, force=True).record != built.record


def test_an_extension_that_fails_while_it_is_imported_is_an_error_with_the_reason(tmp_path):
    module = write_module(tmp_path / "source")
    source = module.folder / f"{module.name}.cpp"
    failing = 'PyErr_SetString(PyExc_ValueError, "too old"); return nullptr;'
    source.write_text(source.read_text().replace("return PyModule_Create(&definition);", failing))
    with pytest.raises(BuildError, match="fails while it is imported: ValueError: too old"):
        load_module(module)


def test_a_build_is_loaded_where_a_part_of_the_tools_has_gone(tmp_path, monkeypatch):
    module = write_module(tmp_path / "source", value=5)
    ensure_built(module)
    monkeypatch.setenv("CXX", str(write_compiler(tmp_path / "another-c++")))
    assert status(module).state == "not built"
    monkeypatch.setitem(sys.modules, "ninja", None)  # as where the package is not installed
    monkeypatch.setenv("PATH", "")
    assert status(module).state == "built"
    assert load_module(module).value() == 5


def test_a_build_is_loaded_where_the_compiler_has_gone(tmp_path, monkeypatch):
    module = write_module(tmp_path / "source", value=5)
    ensure_built(module)
    monkeypatch.setenv("PATH", "")
    assert status(module).state == "built"
    assert load_module(module).value() == 5
