"""Runs a command that ends when the process that started it does: a program of its own, started by ``building``.

Notable: standard input is the lifeline. Whoever started this holds its other end; when that process ends, by whatever
signal, the pipe closes, and the command is asked to end. ninja then ends the compilers that it started. Without it the
compilers of a killed build would go on, and slow down the next one.

It imports the standard library only, and little of that: it runs without the packages of the environment.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading


def main() -> int:
    """Run the command in ``sys.argv``; returns its exit code."""
    process = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)

    def watch() -> None:
        while os.read(0, 64):  # unbuffered: Python's own stdin may not be waited on while the interpreter ends
            pass
        process.terminate()

    threading.Thread(target=watch, daemon=True).start()
    return process.wait()


if __name__ == "__main__":
    sys.exit(main())
