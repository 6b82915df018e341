"""Building kernel modules: what is compiled, when a build is used again, and what a failure says."""

import json
import logging
import os
import shutil
import subprocess
import sys
import sysconfig
import traceback
from dataclasses import replace
from pathlib import Path

import pytest

from polyscale.device_host import tool_output
from polyscale.errors import BuildError
from polyscale.interfaces.op import Source
from polyscale.ops import load_module, status, tools
from polyscale.ops.building import build
from polyscale.ops.failures import first_error
from polyscale.ops.loading import ensure_built
from polyscale.ops.recipe import recipe
from polyscale.testing.kernel_modules import find_compiler, write_compiler, write_module


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    find_compiler()
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("POLYSCALE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def refusal(call, *args, **kwargs):
    with pytest.raises(BuildError) as caught:
        call(*args, **kwargs)
    return caught.value


@pytest.mark.parametrize("compiler", ["/nonexistent/c++", "/", "ccache g++"])
def test_a_named_compiler_that_is_no_program_is_not_replaced_by_another(tmp_path, monkeypatch, compiler):
    monkeypatch.setenv("CXX", compiler)
    module = write_module(tmp_path / "source", value=5)
    assert status(module).state == "cannot build"
    with pytest.raises(BuildError, match=r"is no program.*CXX") as caught:
        ensure_built(module)
    assert repr(compiler) in caught.value.why


def test_a_compiler_that_ends_well_and_writes_nothing_is_a_failed_build(tmp_path, monkeypatch):
    (tmp_path / "idle-c++").write_text("#!/bin/sh\nexit 0\n")
    (tmp_path / "idle-c++").chmod(0o755)
    monkeypatch.setenv("CXX", str(tmp_path / "idle-c++"))
    with pytest.raises(BuildError, match="does not compile"):
        ensure_built(write_module(tmp_path / "source", value=5))


def test_a_module_is_built_once_and_says_so(tmp_path, cache, caplog):
    module = write_module(tmp_path / "source", value=7)
    assert status(module).state == "not built"
    extension = load_module(module)
    assert extension.value() == 7
    assert load_module(module) is extension
    assert [record.getMessage() for record in caplog.records] == [
        f"Building kernel module {module.name} (1 source, once; it is kept in {cache / 'kernels' / module.name})"
    ]
    found = status(module)
    assert (found.state, found.why, found.fix) == ("built", "", "")
    assert found.path.parent.parent.parent == cache / "kernels"


def test_a_build_is_used_again(tmp_path):
    module = write_module(tmp_path / "source")
    first = ensure_built(module)
    assert ensure_built(module) == first
    assert ensure_built(module, force=True).record.built > first.record.built


def test_the_record_tells_what_it_was_built_from(tmp_path):
    module = write_module(tmp_path / "source", flags=("-DX=1",))
    built = ensure_built(module)
    record = json.loads((built.path.parent / "build.json").read_text())
    assert record["module"] == module.name
    assert set(record["files"]) == {f"{module.name}.cpp", "value.h"}
    assert record["flags"] == ["-DX=1"]
    assert record["size"] == built.path.stat().st_size
    assert Path(record["compilers"][0].partition(" (")[0]).is_absolute()
    assert "(" in record["compilers"][0] and "version unknown" not in record["compilers"][0]


def _source(module):
    return module.folder / f"{module.name}.cpp"


@pytest.mark.parametrize(
    "change",
    [
        lambda module: _source(module).write_text(_source(module).read_text() + "// changed\n"),
        lambda module: (module.folder / "value.h").write_text("#define VALUE 2\n"),
        lambda module: (module.folder / "deep").mkdir() or (module.folder / "deep" / "new.h").write_text(""),
        lambda module: replace(module, flags=("-DX=1",)),
        lambda module: replace(module, link_flags=("-lm",)),
        lambda module: replace(module, sources=(replace(module.sources[0], flags=("-O1",)),)),
    ],
    ids=["source", "header", "new header", "flag", "link flag", "flag of one source"],
)
def test_a_change_makes_another_build(tmp_path, change):
    module = write_module(tmp_path / "source")
    before = ensure_built(module)
    changed = change(module)
    module = changed if isinstance(changed, type(module)) else module
    assert status(module).state == "not built"
    after = ensure_built(module)
    assert after.path != before.path
    assert before.path.exists(), "the earlier build serves whoever goes back"


def test_what_is_not_compiled_makes_no_other_build(tmp_path):
    module = write_module(tmp_path / "source")
    before = ensure_built(module)
    (module.folder / "notes.txt").write_text("unrelated")
    assert ensure_built(module) == before


def test_another_compiler_makes_another_build(tmp_path, monkeypatch):
    module = write_module(tmp_path / "source")
    before = ensure_built(module)
    compiler = write_compiler(tmp_path / "my-c++")
    monkeypatch.setenv("CXX", str(compiler))
    after = ensure_built(module)
    assert after.path != before.path
    assert after.record.compilers[0].startswith(str(compiler))
    compiler.write_text(compiler.read_text() + "# updated\n")
    assert ensure_built(module).path not in (before.path, after.path)


def test_where_the_compiler_searches_makes_another_build(tmp_path, monkeypatch):
    for name, value in (("one", 1), ("two", 2)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "elsewhere.h").write_text(f"#define ELSEWHERE {value}\n")
    module = write_module(tmp_path / "source", extra="#include <elsewhere.h>\n#undef VALUE\n#define VALUE ELSEWHERE")
    found = []
    for name in ("one", "two"):
        monkeypatch.setenv("CPATH", str(tmp_path / name))
        found.append(ensure_built(module).path)
    assert found[0] != found[1]


def test_the_sources_of_other_machines_are_left_out(tmp_path):
    module = write_module(tmp_path / "source")
    (module.folder / "other.cpp").write_text("#error for another machine\n")
    other = Source("other.cpp", machines=("pdp11",))
    assert ensure_built(replace(module, sources=(*module.sources, other)))
    error = refusal(ensure_built, replace(module, sources=(other,)))
    assert "no source for this machine" in str(error)


def test_flags_of_one_source_reach_that_source_alone(tmp_path):
    module = write_module(tmp_path / "source", extra="#ifdef MARK\n#error leaked\n#endif")
    (module.folder / "marked.cpp").write_text("#ifndef MARK\n#error lacking\n#endif\nint marked() { return 1; }\n")
    assert ensure_built(replace(module, sources=(*module.sources, Source("marked.cpp", flags=("-DMARK",)))))


def test_paths_and_flags_may_have_spaces_and_dollars(tmp_path):
    module = write_module(tmp_path / "a folder with $HOME in it", flags=('-DTEXT="a $PATH b"',))
    assert load_module(module).value() == 1


def test_a_source_that_does_not_compile_is_an_error_with_the_first_line_the_file_and_the_log(tmp_path):
    module = write_module(tmp_path / "source", extra="int broken() { return undeclared_name; }\nint again() { oops }")
    error = refusal(load_module, module)
    assert f"'{module.name}' does not compile" in error.given
    assert f"{module.name}.cpp:" in error.why and "undeclared_name" in error.why and "oops" not in error.why
    log = Path(error.fix.rsplit(" ", 1)[1])
    assert "oops" in log.read_text()
    assert status(module) == type(status(module))("cannot build", error.why, error.fix, failed=True)


def test_a_failure_is_not_repeated_by_the_same_process_until_something_changes(tmp_path, caplog):
    module = write_module(tmp_path / "source", extra="#error not yet")
    first = refusal(load_module, module)
    again = [refusal(load_module, module) for _ in range(3)]
    assert {str(each) for each in again} == {str(first)}
    assert len(caplog.records) == 1
    lengths = [len(list(traceback.walk_tb(each.__traceback__))) for each in again]
    assert lengths[0] == lengths[1] == lengths[2], "the error grows each time it is raised"
    _source(module).write_text(_source(module).read_text().replace("#error not yet", ""))
    assert load_module(module).value() == 1


def test_a_symbol_that_is_nowhere_is_an_error_of_the_import(tmp_path):
    module = write_module(tmp_path / "source", extra="int nowhere();\nint here = nowhere();")
    error = refusal(load_module, module)
    assert "cannot be imported" in error.why and "nowhere" in error.why


def test_a_library_that_is_missing_is_an_error_of_the_linker(tmp_path):
    error = refusal(ensure_built, write_module(tmp_path / "source", link_flags=("-lnot-to-be-found",)))
    assert "not-to-be-found" in error.why


def test_a_missing_source_file_is_named(tmp_path):
    module = write_module(tmp_path / "source")
    _source(module).unlink()
    assert str(_source(module)) in str(refusal(load_module, module))
    assert status(module).state == "cannot build"


def test_a_failed_build_leaves_its_log_and_no_private_folder(tmp_path, cache):
    module = write_module(tmp_path / "source", extra="#error stop")
    refusal(ensure_built, module)
    left = {path.name for path in (cache / "kernels" / module.name).rglob("*")}
    assert left == {".lock", "failed.log", recipe(module).build_key(recipe(module).tools())}


@pytest.mark.parametrize(
    ("log", "line"),
    [
        ("x\nIn file included from a.cpp:1:\na.h:3:5: error: no y\nb.cpp:1:1: error: z\n", "a.h:3:5: error: no y"),
        ("a.cpp:1:10: fatal error: Python.h: No such file\ncompilation terminated.\n", "Python.h"),
        ('k.cu(12): error: identifier "y" is undefined\n', 'k.cu(12): error: identifier "y" is undefined'),
        ("ld: a.o: undefined reference to `f()'\ncollect2: error: ld returned 1\n", "undefined reference to `f()'"),
        ("c++: fatal error: Killed signal terminated program cc1plus\n", "Killed signal"),
        (
            "[1/2] c++ x\nFAILED: [code=1] 0.o\nall went wrong\nninja: build stopped: subcommand failed.\n",
            "all went wrong",
        ),
        ("", "nothing"),
    ],
)
def test_the_line_that_says_what_is_wrong_is_found(log, line):
    assert line in first_error(log)


def test_messages_of_compilers_are_in_english_whatever_the_locale(tmp_path, monkeypatch):
    monkeypatch.setenv("LANG", "de_DE.UTF-8")
    monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")
    assert "error:" in refusal(ensure_built, write_module(tmp_path / "source", extra="#error stop")).why


def test_what_tools_say_of_themselves_may_be_in_any_encoding(tmp_path, monkeypatch):
    compiler = tmp_path / "c++"
    named = """printf 'acme \\377 1.2\\n'; case " $* " in *" --version "*) exit 0 ;; esac"""
    compiler.write_text(f'#!/bin/sh\n{named}\nexec {find_compiler()} "$@"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    assert load_module(write_module(tmp_path / "source", value=4)).value() == 4
    assert "1.2" in tool_output([str(compiler), "--version"])


def test_a_cache_that_cannot_be_written_is_named_with_the_variable(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("POLYSCALE_CACHE", str(tmp_path / "file" / "below"))
    error = refusal(load_module, write_module(tmp_path / "source"))
    assert str(tmp_path / "file" / "below") in error.given
    assert "cannot be written" in error.why and "POLYSCALE_CACHE" in error.fix


LOAD = """
import sys
from pathlib import Path
from polyscale.interfaces.op import KernelModule, Source
from polyscale.ops import load_module
for name, folder in zip(sys.argv[1::2], sys.argv[2::2]):
    print(load_module(KernelModule(name, Path(folder), "cpu", (Source(name + ".cpp"),))).value(), flush=True)
"""


@pytest.mark.skipif(os.name != "posix", reason="rights of POSIX")
def test_a_build_in_a_read_only_cache_is_loaded(tmp_path, cache):
    module, other = write_module(tmp_path / "source", value=3), write_module(tmp_path / "another")
    built = ensure_built(module)
    folders = [built.path.parent, built.path.parent.parent, cache / "kernels", cache]
    command = [sys.executable, "-c", LOAD, module.name, module.folder, other.name, other.folder]
    if os.geteuid() == 0:  # root writes everywhere, unless that right is taken away
        if shutil.which("setpriv") is None:
            pytest.skip("needs setpriv, or another user than root")
        command = ["setpriv", "--bounding-set=-dac_override", *command]
    for folder in folders:
        folder.chmod(0o555)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    finally:
        for folder in folders:
            folder.chmod(0o755)
    assert done.stdout == "3\n", done.stderr
    assert f"Kernel cache {cache / 'kernels' / other.name}: it cannot be written" in done.stderr


def test_looking_for_a_build_writes_nothing(tmp_path, cache):
    module = write_module(tmp_path / "source", value=3)
    ensure_built(module)
    before = {path: path.stat().st_mtime_ns for path in [cache, *cache.rglob("*")]}
    assert load_module(module).value() == 3
    assert {path: path.stat().st_mtime_ns for path in [cache, *cache.rglob("*")]} == before


def test_without_the_variable_the_cache_is_the_users(tmp_path, monkeypatch):
    monkeypatch.delenv("POLYSCALE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    if not os.environ.get("XDG_CACHE_HOME") or os.name != "posix" or os.uname().sysname == "Darwin":
        pytest.skip("another system keeps caches elsewhere")
    path = ensure_built(write_module(tmp_path / "source")).path
    assert path.is_relative_to(tmp_path / "xdg" / "polyscale" / "kernels")


def test_what_dead_builds_left_is_removed_by_the_next_one(tmp_path, cache):
    module = write_module(tmp_path / "source")
    left = cache / "kernels" / module.name / ".build-1-dead"
    left.mkdir(parents=True)
    (left / "0.o").write_text("half an object")
    ensure_built(module)
    assert not left.exists()


def test_a_build_that_will_not_do_is_replaced_only_when_it_is_still_there(tmp_path):
    module = write_module(tmp_path / "source")
    first = ensure_built(module)
    wanted = recipe(module)
    second = build(wanted, wanted.tools(), rejected=first.record)
    assert second.record != first.record
    assert build(wanted, wanted.tools(), rejected=first.record) == second, "another process has replaced it already"


def test_builds_serve_one_python(tmp_path):
    assert ensure_built(write_module(tmp_path / "source")).path.name.endswith(sysconfig.get_config_var("EXT_SUFFIX"))


def test_a_build_is_reported_at_its_end(tmp_path, caplog):
    with caplog.at_level(logging.INFO, "polyscale"):
        module = write_module(tmp_path / "source")
        ensure_built(module)
    assert f"Built kernel module {module.name} in" in caplog.text


def test_where_no_accelerator_names_the_hosts_compiler_the_usual_one_is_taken(tmp_path, monkeypatch):
    """As in the environment that pip makes to build a wheel, where polyscale-core is alone."""
    monkeypatch.setattr(tools, "accelerators", lambda device_type: [])
    built = ensure_built(write_module(tmp_path / "source", value=5))
    assert built.record.compilers[0].startswith(find_compiler())
    monkeypatch.setenv("PATH", "")
    assert "cpu" in refusal(ensure_built, write_module(tmp_path / "other", value=6)).why
