"""Sets up the virtual environment of this tree, or finds that it is up to date and touches nothing.

Notable: it runs under whatever Python 3 the machine has, so it imports the standard library only. What was installed
is remembered as a hash of the interpreter, the torch requirement and every file that states requirements, so a second
run needs no network; editable members see changes of their code without it. pip's own variables pass through.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = ROOT / "tests" / "dev.txt"
OLDEST = (3, 10)


def stated() -> list[Path]:
    """Files that state what must be installed: dev.txt and the pyproject.toml of each of its members."""
    lines = REQUIREMENTS.read_text("utf-8").split("\n")
    members = [line.removeprefix("-e").strip() for line in lines if line.startswith("-e")]
    return [REQUIREMENTS, *(ROOT / member / "pyproject.toml" for member in members)]


def digest(torch: str) -> str:
    """Hash of all that decides what is installed."""
    found = hashlib.sha256(f"{sys.version_info[:2]} {ROOT} {torch}".encode())
    for path in stated():
        found.update(path.read_bytes())
    return found.hexdigest()


@contextlib.contextmanager
def alone(lock: Path) -> Iterator[None]:
    """Let one process at a time set up; the lock ends with its process."""
    with lock.open("w") as file:
        if sys.platform != "win32":
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def set_up(venv: Path, torch: str) -> None:
    """Create ``venv`` where it is missing, and install what ``dev.txt`` says where that has changed."""
    venv.mkdir(parents=True, exist_ok=True)
    with alone(venv / ".lock"):
        stamp, wanted = venv / ".installed", digest(torch)
        python = venv / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
        if python.exists() and stamp.exists() and stamp.read_text() == wanted:
            return
        started = time.monotonic()
        stamp.unlink(missing_ok=True)
        if not python.exists():
            say(f"Making {venv} with Python {sys.version.split()[0]}")
            run([sys.executable, "-m", "venv", str(venv)], fix="On Debian: apt-get install python3-venv")
        say(f"Installing {torch} and every member with the tools that test them")
        pip = [str(python), "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
        fix = "pip must reach a package index, or PIP_FIND_LINKS or PIP_INDEX_URL must name one"
        run([*pip, "flit_core>=3.11,<5", torch], fix=fix)
        run([*pip, "--no-build-isolation", "-r", str(REQUIREMENTS)], fix=fix)
        stamp.write_text(wanted)
        say(f"Set up in {time.monotonic() - started:.0f} s")


def run(command: list[str], *, fix: str) -> None:
    """Run a command; where it fails, end with what to do."""
    quiet = {**os.environ, "PIP_ROOT_USER_ACTION": "ignore", "PYTHONDONTWRITEBYTECODE": ""}
    code = subprocess.run(command, cwd=ROOT, env=quiet, check=False).returncode
    if code:
        raise SystemExit(f"Error: {' '.join(command[1:4])} ended with code {code}. {fix}.")


def say(text: str) -> None:
    """Tell people; the output of the target itself belongs on stdout."""
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Set up the virtual environment of this tree.")
    parser.add_argument("venv", type=Path, help="its folder")
    parser.add_argument("--torch", default="torch==2.13.0", help="requirement for torch (default: %(default)s)")
    args = parser.parse_args()
    if sys.version_info < OLDEST:
        needs = ".".join(map(str, OLDEST))
        raise SystemExit(f"Error: Python {sys.version.split()[0]}. polyscale needs {needs} or newer: make PYTHON=...")
    try:
        set_up(args.venv, args.torch)
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except OSError as error:
        raise SystemExit(f"Error: {args.venv} cannot be set up. {error}.") from None


if __name__ == "__main__":
    main()
