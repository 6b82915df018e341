"""Threads that wait in native code, and the end of their process."""

import os
import subprocess
import sys
import threading
import time

import pytest

from polyscale import background

WAITS = """
import os, sys, threading, time
from polyscale import background

def run():
    with background.working():
        try:
            background.wait_until(lambda: False)
        except background.ProcessEnding:
            print("stopped", flush=True)

threading.Thread(target=run, daemon=True).start()
time.sleep(0.1)
"""


def program(text):
    started = time.monotonic()
    done = subprocess.run([sys.executable, "-c", WAITS + text], capture_output=True, text=True, timeout=30, check=False)
    return done.returncode, done.stdout, time.monotonic() - started


def test_a_wait_ends_when_what_is_waited_for_is_there():
    there = threading.Event()
    threading.Timer(0.05, there.set).start()
    background.wait_until(there.is_set)
    assert not background.is_ending()


@pytest.mark.parametrize(("last", "code"), [("", 0), ("raise KeyError(1)", 1), ("sys.exit(7)", 7)])
def test_a_thread_that_waits_is_stopped_and_the_exit_code_stays(last, code):
    returncode, output, seconds = program(last)
    assert (returncode, output) == (code, "stopped\n")
    assert seconds < background.GRACE_S


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_does_not_wait_for_the_threads_of_its_parent():
    text = """
started = time.monotonic()
if os.fork() == 0:
    print("child", background.is_ending(), flush=True)
    sys.exit(3)
print(os.waitstatus_to_exitcode(os.wait()[1]), time.monotonic() - started < 2, flush=True)
"""
    returncode, output, _ = program(text)
    assert returncode == 0
    assert output.splitlines() == ["child False", "3 True", "stopped"]
