"""``scale build`` and ``scale clean``, and what the report says of kernels: real modules in a cache of their own."""

import itertools
import json
import os
import re
import subprocess
import sys
import time

import pytest

from polyscale.testing.distributions import write_distribution
from polyscale.testing.kernel_modules import find_compiler, write_compiler, write_module, write_op_library
from polyscale_cli.main import main
from polyscale_cli.report.collect import collect

_NUMBERS = itertools.count()


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("POLYSCALE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Install a library with an op and its kernel for the CPU; returns the op's name and the module."""

    def do(**fields):
        find_compiler()
        op = f"acme_built_{next(_NUMBERS)}_"
        module = write_module(tmp_path / op / "source", value=3, **fields)
        monkeypatch.syspath_prepend(str(write_op_library(tmp_path / op / "site", module, op, dist=f"acme-{op}")))
        return op, module

    return do


def told(capsys, *words):
    code = main(words)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_build_alone_lists_what_there_is(install, capsys):
    op, module = install()
    code, out, _ = told(capsys, "build")
    assert code == 0
    assert re.search(rf"{module.name} +cpu +not built +{op}", out)
    assert "scale build --all" in out
    assert told(capsys, "build", module.name)[0] == 0
    assert re.search(rf"{module.name} +cpu +built", told(capsys, "build")[1])


def test_a_module_can_be_named_by_itself_by_its_op_and_by_its_library(install, capsys):
    op, module = install()
    code, out, err = told(capsys, "build", op)
    assert code == 0 and re.fullmatch(rf"{module.name} \(cpu\): built in \d+\.\d s\n", out)
    assert err.startswith(f"Building kernel module {module.name} (1 source, once;")
    for name in (op, module.name):  # the library has the name of its module
        assert told(capsys, "build", name) == (0, f"{module.name} (cpu): built\n", "")


def test_force_builds_again(install, capsys, cache):
    op, _ = install()
    assert told(capsys, "build", op)[0] == 0
    before = sorted(cache.rglob("*.so"))
    assert "built in" in told(capsys, "build", op, "--force")[1]
    after = sorted(cache.rglob("*.so"))
    assert len(before) == len(after) == 1 and before != after


def test_one_that_fails_is_exit_1_and_the_others_are_built(install, capsys):
    bad, broken = install(extra="int broken() { return undeclared_name; }")
    good, whole = install()
    code, out, err = told(capsys, "build", bad, good)
    assert code == 1
    assert f"{whole.name} (cpu): built in" in out and broken.name not in out
    assert f"{broken.name} (cpu): Kernel module '{broken.name}' does not compile: " in err
    assert "undeclared_name" in err and "Traceback" not in err


def test_an_extension_that_cannot_be_imported_is_a_failure(install, capsys):
    op, _ = install(extra="int nowhere();\nint here = nowhere();")
    code, _, err = told(capsys, "build", op)
    assert code == 1 and "cannot be imported" in err and "nowhere" in err


@pytest.mark.parametrize("words", [["acme_bulit"], ["--all", "cpu"]], ids=["unknown", "both"])
def test_mistakes_are_exit_2(install, capsys, words):
    op, _ = install()
    words = [word.replace("acme_bulit", op.replace("built", "bulit")) for word in words]
    code, out, err = told(capsys, "build", *words)
    assert (code, out) == (2, "")
    assert err.startswith("Error: ")
    if "--all" not in words:
        assert f"Did you mean '{op}'?" in err


def test_an_op_without_kernels_has_nothing_to_build(tmp_path, monkeypatch, capsys):
    source = """
        from polyscale.hooks import hookimpl
        from polyscale.interfaces.op import Op

        class Plugin:
            interface_version = (1, 0)
            name = "plain"
            @hookimpl
            def polyscale_op(self, context): return self
            def ops(self): return [Op("acme_plain", "(Tensor x) -> Tensor", abs)]
            def modules(self): return []
            def kernels(self): return []
    """
    entry_points = {"polyscale.op": {"plain": "acme_plain_ops:Plugin"}}
    folder = write_distribution(
        tmp_path / "x", "acme-plain", entry_points=entry_points, modules={"acme_plain_ops": source}
    )
    monkeypatch.syspath_prepend(str(folder))
    code, _, err = told(capsys, "build", "acme_plain")
    assert code == 2 and "reference runs everywhere" in err
    (row,) = (row for row in collect({"op"}).ops if row.name == "acme_plain")
    assert (row.status, row.kernels) == ("reference", ())


def test_a_kernel_of_no_module_hinders_no_other_op(install, tmp_path, monkeypatch, capsys):
    lost, _ = install()
    package = next((tmp_path / lost / "site").rglob("acme_tiny_*.py"))
    package.write_text(package.read_text().replace(f'Kernel("{lost}", "cpu", "', f'Kernel("{lost}", "cpu", "no_'))
    op, module = install()
    assert told(capsys, "build", op)[1].startswith(f"{module.name} (cpu): built in")
    code, _, err = told(capsys, "build", lost)
    assert code == 2 and "names the module 'no_" in err


def test_clean_removes_builds_and_says_how_many_bytes(install, capsys, cache):
    op, module = install()
    told(capsys, "build", op)
    (cache / "kernels" / "notes").mkdir()
    (cache / "kernels" / "notes" / "mine.txt").write_text("keep")
    (cache / "kernels" / module.name / "mine.txt").write_text("keep")
    total = sum(
        path.stat().st_size for path in cache.rglob("*") if path.is_file() and path.name not in (".lock", "mine.txt")
    )
    assert told(capsys, "clean") == (0, f"Removed {module.name}: {total} bytes in {cache / 'kernels'}\n", "")
    left = {path.name for path in cache.rglob("*") if path.is_file()}
    assert left == {".lock", "mine.txt"}
    assert told(capsys, "clean") == (0, f"Nothing to remove: 0 bytes in {cache / 'kernels'}\n", "")
    assert told(capsys, "build", op)[0] == 0


def test_clean_without_a_cache_has_nothing_to_do(capsys):
    assert told(capsys, "clean")[0] == 0


@pytest.mark.skipif(os.name != "posix", reason="a shell script")
def test_clean_leaves_a_module_that_is_being_built_and_says_by_whom(install, tmp_path, monkeypatch, capsys, cache):
    op, _ = install()
    hurried = tmp_path / "hurried"
    wait = f"for i in $(seq 600); do [ -e {hurried} ] && break; sleep 0.1; done"
    monkeypatch.setenv("CXX", str(write_compiler(tmp_path / "slow-c++", wait)))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if "site" in path))
    command = [sys.executable, "-m", "polyscale", "build", op]
    builder = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    end = time.monotonic() + 60
    while not list(cache.rglob("build.ninja")):
        assert builder.poll() is None and time.monotonic() < end
        time.sleep(0.05)
    code, out, err = told(capsys, "clean")
    assert code == 2
    assert "Nothing to remove" in out
    assert f"process {builder.pid} on " in err and "is building it" in err
    hurried.touch()
    out, err = builder.communicate(timeout=60)
    assert builder.returncode == 0 and "built in" in out, err
    assert told(capsys, "clean")[0] == 0


def test_the_report_says_what_runs_and_what_to_do(install, capsys):
    op, module = install()
    bad, _ = install(extra="#error not like this")

    def row(name):
        code, out, _ = told(capsys, "report", "--json", "--kind", "op")
        assert code == 0
        return next(row for row in json.loads(out)["ops"] if row["name"] == name)

    found = row(op)
    assert found == {
        "name": op,
        "owner": f"acme-{op}",
        "device_types": ["cpu"],
        "status": "kernels",
        "kernels": [
            {
                "device_type": "cpu",
                "module": module.name,
                "owner": f"acme-{op}",
                "state": "not built",
                "note": f"Run `scale build {module.name}`, or it is built at first use",
            }
        ],
        "why": "",
    }
    told(capsys, "build", op, bad)
    assert (row(op)["kernels"][0]["state"], row(op)["kernels"][0]["note"]) == ("built", "")
    (kernel,) = row(bad)["kernels"]
    assert kernel["state"] == "cannot build" and "not like this" in kernel["note"]
    assert told(capsys, "report", "--require", f"op={bad}")[0] == 0, "its reference runs"
    out = told(capsys, "report", "--kind", "op")[1]
    assert re.search(rf"{module.name} +acme-\S+ +cpu +built", out)


def test_the_report_names_a_broken_library(tmp_path, monkeypatch, capsys):
    entry_points = {"polyscale.op": {"torn": "acme_torn_ops:Plugin"}}
    folder = write_distribution(
        tmp_path / "x", "acme-torn", entry_points=entry_points, modules={"acme_torn_ops": "1 / 0"}
    )
    monkeypatch.syspath_prepend(str(folder))
    (row,) = (row for row in collect({"op"}).ops if row.name == "torn")
    assert row.status == "broken" and "ZeroDivisionError" in row.why


@pytest.mark.long
def test_all_builds_what_is_for_this_machine_and_nothing_that_must_be_named(install, capsys):
    """With the modules of this tree, compiled for real."""
    from polyscale.ops.libraries import modules

    _, module = install()
    code, out, err = told(capsys, "build", "--all")
    assert code == 0, err
    assert f"{module.name} (cpu): built in" in out
    for each in modules():
        expected = "only when named" if not each.ahead else "built in" if each.device_type == "cpu" else ""
        assert re.search(rf"^{each.name} \({each.device_type}\): .*{expected}", out, flags=re.MULTILINE)
