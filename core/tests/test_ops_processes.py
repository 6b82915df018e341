"""Builders that are killed, interrupted, or start together. The compiler is real, and made slow by a script."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from polyscale.errors import BuildError
from polyscale.ops import status
from polyscale.ops.loading import ensure_built
from polyscale.testing.kernel_modules import find_compiler, write_compiler, write_module

pytestmark = pytest.mark.skipif(os.name != "posix", reason="signals and shell scripts")
LOAD = """
import logging, sys
from pathlib import Path
from polyscale.interfaces.op import KernelModule, Source
from polyscale.ops import load_module
logging.basicConfig(level=logging.INFO, format="%(message)s")
name, folder = sys.argv[1:]
print(load_module(KernelModule(name, Path(folder), "cpu", (Source(name + ".cpp"),))).value())
"""


@pytest.fixture
def slow(tmp_path, monkeypatch):
    """A compiler that takes long until ``hurry`` is called, and writes a line per call: its process id."""
    find_compiler()
    monkeypatch.setenv("POLYSCALE_CACHE", str(tmp_path / "cache"))
    calls, hurried = tmp_path / "calls", tmp_path / "hurried"
    calls.touch()
    wait = f"for i in $(seq 600); do [ -e {hurried} ] && break; sleep 0.1; done"
    monkeypatch.setenv("CXX", str(write_compiler(tmp_path / "slow-c++", f"echo $$ >> {calls}", wait)))
    yield Slow(calls, hurried)
    hurried.touch()


class Slow:
    def __init__(self, calls, hurried):
        self._calls, self.hurry = calls, hurried.touch

    def calls(self):
        return [int(line) for line in self._calls.read_text().split()]


def start(module):
    command = [sys.executable, "-c", LOAD, module.name, str(module.folder)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def until(condition, what, seconds=30):
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, what
        time.sleep(0.02)
    return found


def ended(pid):
    """Whether a process has ended; one that nobody has waited for yet has."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return not Path("/proc/self").exists() and _gone(pid)
    return state == "Z"


def _gone(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def all_ended(pids):
    return all(ended(pid) or _gone(pid) for pid in pids)


def owner(cache, module):
    return json.loads((cache / "kernels" / module.name / ".owner").read_text())


def private_folders(tmp_path, module):
    return list((tmp_path / "cache" / "kernels" / module.name).glob(".build-*"))


def test_a_killed_build_does_not_block_the_next_one(tmp_path, slow):
    module = write_module(tmp_path / "source", value=4)
    builder = start(module)
    until(slow.calls, "the compiler was not started")
    assert private_folders(tmp_path, module)
    builder.kill()
    builder.communicate()
    until(lambda: all_ended(slow.calls()), "the compilers of a killed build go on")
    assert status(module).state == "not built"
    slow.hurry()
    again = start(module)
    out, err = again.communicate(timeout=60)
    assert (again.returncode, out) == (0, "4\n"), err
    assert "waiting" not in err
    assert len(slow.calls()) == 2
    assert private_folders(tmp_path, module) == []


def test_ctrl_c_ends_the_compilers_and_leaves_nothing(tmp_path, slow):
    module = write_module(tmp_path / "source")
    builder = start(module)
    until(slow.calls, "the compiler was not started")
    builder.send_signal(signal.SIGINT)
    _, err = builder.communicate(timeout=30)
    assert builder.returncode != 0 and "KeyboardInterrupt" in err
    assert all_ended(slow.calls())
    left = {path.name for path in (tmp_path / "cache" / "kernels" / module.name).iterdir()}
    assert left == {".lock"}
    slow.hurry()
    assert ensure_built(module)


def test_of_two_at_once_one_builds_and_the_other_waits_and_says_for_whom(tmp_path, slow):
    module = write_module(tmp_path / "source", value=6)
    first = start(module)
    until(slow.calls, "the compiler was not started")
    second = start(module)
    waiting = second.stderr.readline()
    assert waiting == f"Kernel module {module.name}: waiting for process {first.pid} on {socket.gethostname()}\n"
    slow.hurry()
    for process in (first, second):
        out, err = process.communicate(timeout=60)
        assert (process.returncode, out) == (0, "6\n"), err
    assert len(slow.calls()) == 1


def test_whoever_waits_for_a_killed_builder_builds(tmp_path, slow):
    module = write_module(tmp_path / "source", value=6)
    first = start(module)
    until(slow.calls, "the compiler was not started")
    second = start(module)
    assert "waiting" in second.stderr.readline()
    slow.hurry()  # what the killed one had started may be done by now: it is not used
    first.kill()
    first.communicate()
    out, err = second.communicate(timeout=60)
    assert (second.returncode, out) == (0, "6\n"), err
    assert private_folders(tmp_path, module) == []


def test_a_failure_that_was_waited_for_is_not_repeated(tmp_path, slow):
    module = write_module(tmp_path / "source", extra="#error both need this")
    first = start(module)
    until(slow.calls, "the compiler was not started")
    second = start(module)
    assert "waiting" in second.stderr.readline()
    slow.hurry()
    for process in (first, second):
        _, err = process.communicate(timeout=60)
        assert process.returncode == 1
        assert "BuildError" in err and "both need this" in err
    assert len(slow.calls()) == 1


def test_a_failure_that_was_waited_for_is_known_whatever_the_clocks_say(tmp_path, slow, monkeypatch):
    """The clock of a file system in the network may be another one than that of the host."""
    module = write_module(tmp_path / "source", extra="#error both need this")
    first = start(module)
    until(slow.calls, "the compiler was not started")
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + 3600)
    threading.Timer(0.5, slow.hurry).start()
    with pytest.raises(BuildError, match="both need this"):
        ensure_built(module)
    first.communicate(timeout=60)
    assert len(slow.calls()) == 1


def test_builds_of_different_modules_do_not_wait_for_one_another(tmp_path, slow, monkeypatch):
    held = write_module(tmp_path / "held")
    builder = start(held)
    until(slow.calls, "the compiler was not started")
    monkeypatch.delenv("CXX")
    assert ensure_built(write_module(tmp_path / "free"))
    assert builder.poll() is None
    slow.hurry()
    assert builder.communicate(timeout=60)[0] == "1\n"
