"""What sets up a clone: ``tests/dev.txt``, ``tools/setup_venv.py``, and the Makefile's messages."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SETUP = ROOT / "tools" / "setup_venv.py"


@pytest.fixture
def tree(tmp_path):
    """A copy of what decides what is installed, with an interpreter that only counts how often it is called."""
    for path in [SETUP, *ROOT.glob("tests/dev.txt"), *ROOT.glob("**/pyproject.toml")]:
        if ".venv" not in path.parts:
            copy = tmp_path / path.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, copy)
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\necho "$@" >> "$(dirname "$0")/calls"\nexit "${FAKE_EXIT:-0}"\n')
    python.chmod(0o755)
    return tmp_path


def set_up(tree, *arguments, fails=False):
    done = subprocess.run(
        [sys.executable, str(tree / "tools" / "setup_venv.py"), str(tree / ".venv"), *arguments],
        capture_output=True, text=True, timeout=60, check=False, env={"FAKE_EXIT": "3" if fails else "0"},
    )  # fmt: skip
    calls = tree / ".venv" / "bin" / "calls"
    made = calls.read_text().splitlines() if calls.exists() else []
    calls.unlink(missing_ok=True)
    return done, made


def test_second_run_installs_nothing_and_a_changed_requirement_installs_again(tree):
    done, calls = set_up(tree, "--torch", "torch==1")
    assert done.returncode == 0, done.stderr
    assert len(calls) == 2
    assert "torch==1" in calls[0]
    assert "dev.txt" in calls[1]
    assert set_up(tree, "--torch", "torch==1")[1] == []
    assert len(set_up(tree, "--torch", "torch==2")[1]) == 2
    for changed in ("tests/dev.txt", "core/pyproject.toml", "pyproject.toml"):
        with (tree / changed).open("a") as file:
            file.write("\n# changed\n")
        assert len(set_up(tree, "--torch", "torch==2")[1]) == 2, changed
        assert set_up(tree, "--torch", "torch==2")[1] == []


def test_failed_installation_is_said_and_tried_again(tree):
    done, _ = set_up(tree, fails=True)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("Error: ")
    assert "package index" in done.stderr
    assert "Traceback" not in done.stderr
    assert len(set_up(tree)[1]) == 2


def test_every_member_is_developed_and_the_metapackage_comes_last():
    lines = (ROOT / "tests" / "dev.txt").read_text().splitlines()
    listed = [line.split()[1] for line in lines if line.startswith("-e ")]
    folders = ("accelerators", "plugins", "csrc")
    members = [path for folder in folders for path in ROOT.glob(f"{folder}/*/pyproject.toml")]
    wanted = {f"./{path.parent.relative_to(ROOT)}" for path in members} | {"./core", "./entrypoints", "."}
    assert set(listed) == wanted
    assert listed[-1] == "."


def make(*arguments):
    return subprocess.run(["make", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
def test_make_alone_lists_every_target_and_a_missing_python_is_said():
    phony = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.M).group(1).split()
    listed = {line.split()[1] for line in make().stdout.splitlines() if line.startswith("  make ")}
    assert listed == set(phony)
    done = make("venv", "PYTHON=no-such-python")
    assert done.returncode == 2
    assert "no-such-python is not there" in done.stderr
