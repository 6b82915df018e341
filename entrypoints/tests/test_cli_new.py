"""``scale new``: what it writes works as it is, it overwrites nothing, and it takes no name that is taken."""

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from polyscale_cli.main import main

KINDS = ("optimizer", "observer", "io", "op")


def told(capsys, *words):
    code = main(["new", *map(str, words)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def files(folder):
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def install(project, target):
    """Build the wheel of ``project`` and unpack it into ``target``, as installing does."""
    built = project.parent / "wheels"
    code = f"import sys; from flit_core import buildapi; sys.stdout.write(buildapi.build_wheel({str(built)!r}))"
    built.mkdir(exist_ok=True)
    wheel = subprocess.run([sys.executable, "-c", code], cwd=project, check=True, capture_output=True, text=True).stdout
    zipfile.ZipFile(built / wheel).extractall(target)


def python(target, *words, timeout=100):
    environ = {**os.environ, "PYTHONPATH": str(target), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *map(str, words)], env=environ, cwd=target, capture_output=True, text=True, timeout=timeout
    )


@pytest.mark.long
def test_plugins_are_installed_and_pass_their_own_tests(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    target = tmp_path / "installed"
    for kind in KINDS:
        code, out, err = told(capsys, kind, f"acme_{kind}")
        assert code == 0, err
        project = tmp_path / f"acme-{kind}-polyscale"
        assert f"pip install ./{project.name}\n" in out
        assert ("scale build acme_op\n" if kind == "op" else f"--require {kind}=acme_{kind}\n") in out
        install(project, target)
    tests = [tmp_path / f"acme-{kind}-polyscale" / "tests" for kind in KINDS]
    # Compiling the kernel takes long: tests/test_third_party.py does it.
    words = ["-m", "pytest", "-q", "-W", "error", "-p", "no:cacheprovider", "-k", "not the_kernel", *tests]
    done = python(target, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^13 passed", done.stdout, re.MULTILINE), done.stdout
    listed = python(target, "-m", "polyscale", "report", "--list").stdout.splitlines()
    assert {f"{kind}=acme_{kind}" for kind in KINDS} <= set(listed)
    refused = python(target, "-m", "polyscale", "new", "observer", "acme_io")
    assert refused.returncode == 2
    assert "acme-io-polyscale 0.1.0 is installed" in refused.stderr


@pytest.mark.parametrize("kind", ["accelerator", *KINDS])
def test_generated_code_is_formatted_and_free_of_findings(kind, tmp_path, capsys):
    assert told(capsys, kind, "acme", "-o", tmp_path / "acme")[0] == 0
    for check in (["check", "--select", "E,F,W,I,B,UP"], ["format", "--check"]):
        line = [sys.executable, "-m", "ruff", *check, "--isolated", "--no-cache", "--target-version", "py310", "."]
        done = subprocess.run(line, cwd=tmp_path / "acme", capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout
    text = "\n".join(path.read_text() for path in (tmp_path / "acme").rglob("*") if path.is_file())
    assert "$" not in text


@pytest.mark.parametrize("name", ["none", "granularity"])
def test_a_name_that_python_or_the_template_uses_gives_code_that_works(name, tmp_path, capsys):
    assert told(capsys, "optimizer", name, "-o", tmp_path / name)[0] == 0
    line = [sys.executable, "-m", "ruff", "check", "--select", "E9,F", "--isolated", "--no-cache", tmp_path / name]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("words", "hints"),
    [
        (["accelerator", "Acme-One"], ["'Acme-One'", "lower-case", "Take 'acme_one'"]),
        (["accelerator", "9"], ["'9'", "Take a name such as 'acme'"]),
        (["accelerator", "cpu"], ["polyscale-backend-cpu", "provides it"]),
        (["accelerator", "meta"], ["Torch uses it"]),
        (["accelerator", "nn"], ["torch.nn is something else"]),
        (["accelerator", "auto"], ["whichever device is there"]),
        (["accelerator", "mps"], ["Torch has a device type of that name", "--device-type mps"]),
        (["accelerator", "acme2"], ["'acme2'", "without digits"]),
        (["accelerator", "mps", "--device-type", "acme"], ["Torch has a device type of that name"]),
        (["accelerator", "acme", "--device-type", "acme:0"], ["'acme:0'", "lower-case letters"]),
        (["accelerator", "acme", "--device-type", "cpu"], ["'cpu'", "Leave --device-type out"]),
        (["optimizer", "adamw"], ["'adamw'", "polyscale-standard"]),
        (["io", "polyscale_fast"], ["polyscale's own"]),
        (["op", "fused_adam_"], ["'fused_adam_'", "polyscale-standard"]),
        (["optimizer", "lambda"], ["'lambda'", "Take lambda_optimizer"]),
        (["optmizer", "acme"], ["Did you mean 'optimizer'?"]),
        (["io"], ["scale new io --help"]),
    ],
)
def test_a_name_that_cannot_be_taken_is_refused_and_nothing_is_written(words, hints, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code, out, err = told(capsys, *words)
    assert (code, out) == (2, "")
    assert err.startswith("Error: ")
    assert not [hint for hint in hints if hint not in err], err
    assert not list(tmp_path.iterdir())


def test_a_name_that_polyscale_publishes_is_refused_before_it_is_installed(tmp_path, monkeypatch, capsys):
    from polyscale_cli.scaffold import names

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(names, "installed", lambda kind: [])
    code, _, err = told(capsys, "accelerator", "sim")
    assert code == 2
    assert "polyscale-backend-sim provides it" in err


@pytest.mark.parametrize("before", ["folder", "file"])
def test_nothing_is_overwritten(before, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    mine = tmp_path / "acme-polyscale"
    mine.mkdir() if before == "folder" else mine.write_text("mine")
    code, out, err = told(capsys, "io", "acme")
    assert (code, out) == (2, "")
    assert err.startswith("Error: acme-polyscale exists: nothing is ever overwritten")
    assert "--output" in err
    assert list(tmp_path.iterdir()) == [mine]
    assert not list(mine.iterdir()) if before == "folder" else mine.read_text() == "mine"


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    code, _, err = told(capsys, "io", "acme", "-o", tmp_path / "file" / "acme")
    assert code == 2
    assert err.startswith("Error: ") and "cannot be written" in err


def test_what_cannot_be_finished_is_taken_away(tmp_path, capsys, monkeypatch):
    real, written = Path.write_text, []

    def full_disk(path, *args, **kwargs):
        if len(written) == 2:
            raise OSError(28, "No space left on device")
        written.append(path)
        return real(path, *args, **kwargs)

    monkeypatch.setattr(Path, "write_text", full_disk)
    code, _, err = told(capsys, "io", "acme", "-o", tmp_path / "acme")
    assert code == 2
    assert "No space left on device" in err
    assert len(written) == 2 and not (tmp_path / "acme").exists()


def test_an_accelerator_for_a_device_of_torch_states_what_torch_knows(tmp_path, capsys):
    assert told(capsys, "accelerator", "acme", "--device-type", "mps", "-o", tmp_path / "one")[0] == 0
    text = (tmp_path / "one" / "acme_polyscale" / "accelerator.py").read_text()
    assert 'device_type = "mps"' in text
    assert "modules: tuple[str, ...] = ()" in text and "private" not in text
    assert told(capsys, "accelerator", "acme", "--device-type", "xyz", "-o", tmp_path / "two")[0] == 0
    text = (tmp_path / "two" / "acme_polyscale" / "accelerator.py").read_text()
    assert 'modules = ("torch_xyz",)' in text and "private = True" in text
    assert files(tmp_path / "one") == files(tmp_path / "two") == {
        ".gitignore", "README.md", "pyproject.toml", "acme_polyscale/__init__.py", "acme_polyscale/accelerator.py",
        "tests/test_accelerator.py", "tests/test_parity.py",
    }  # fmt: skip


def test_an_accelerator_without_its_device_says_so_and_its_tests_pass(tmp_path, capsys):
    assert told(capsys, "accelerator", "acme", "--device-type", "xyz", "-o", tmp_path / "acme")[0] == 0
    target = tmp_path / "installed"
    install(tmp_path / "acme", target)
    done = python(target, "-m", "polyscale", "report", "--require", "accelerator=acme")
    assert done.returncode == 1
    assert "torch_xyz is not installed" in done.stderr
    tests = python(target, "-m", "pytest", "-q", "-W", "error", "-p", "no:cacheprovider", tmp_path / "acme" / "tests")
    assert re.search(r"^1 passed, [0-9]+ skipped", tests.stdout, re.MULTILINE), tests.stdout + tests.stderr


def test_an_accelerator_with_one_device_and_one_dtype_is_held_to_no_more(tmp_path, capsys, monkeypatch):
    sim = pytest.importorskip("polyscale_sim.accelerator").SimAccelerator()
    if why := sim.why_unavailable():
        pytest.skip(why)
    assert told(capsys, "accelerator", "acme", "-o", tmp_path / "acme")[0] == 0
    file = tmp_path / "acme" / "acme_polyscale" / "accelerator.py"
    text = file.read_text()
    file.write_text(text.replace('{"fp64", "fp32", "bf16", "fp16"}', '{"fp32"}'))
    assert file.read_text() != text
    install(tmp_path / "acme", target := tmp_path / "installed")
    monkeypatch.setenv("POLYSCALE_SIM_DEVICES", "1")
    words = ["-m", "pytest", "-v", "-rs", "-W", "error", "-p", "no:cacheprovider", tmp_path / "acme" / "tests"]
    found = python(target, *words, "-k", "parity or two_devices").stdout
    assert re.search(r"^=+ [0-9]+ skipped", found, re.MULTILINE), found
    assert "two devices are needed" in found
    assert "fp32" in found and "fp64" not in found
