"""Clean environments: a Python in which nothing of this tree is installed but from wheels.

They see the third-party packages of the environment that runs the tests, through a folder of links, and nothing of the
tree: a member that was not installed from its wheel is not there. What is built (``POLYSCALE_CACHE``, else the user's
cache) is shared with the tests.
"""

import os
import site
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import pytest
from filelock import FileLock

sys.path.append(str(Path(__file__).parent))  # for ``engine_line``, here and on the ranks
ROOT = Path(__file__).resolve().parent.parent
CACHE = "POLYSCALE_CACHE"
PATTERNS = (".", "*", "accelerators/*", "plugins/*", "csrc/*")
# pip as a shell finds it: it needs no network, and installs into the environment.
PIP = """#!/bin/sh
what=$1; shift
case $what in
    install | wheel) set -- --no-index --no-build-isolation --find-links "{dist}" "$@" ;;
esac
exec "{outer}" -m pip --python "{python}" "$what" -q "$@"
"""


@dataclass(frozen=True)
class Environment:
    """A virtual environment.

    Attributes:
        folder: where it is.
        python: its interpreter.
    """

    folder: Path
    python: Path

    @property
    def packages(self):
        """Distributions of polyscale, or of plugins for it, that are installed in it."""
        found = self.folder.glob("lib/python*/site-packages/*.dist-info")
        return {path.name.split("-")[0] for path in found}

    def run(self, *command, cwd=None, timeout=120, **variables):
        """Run a command in it; returns what it did, whether it went well or not."""
        ours = ("PYTHON", "POLYSCALE", "PIP_")
        kept = {name: os.environ[name] for name in os.environ if not name.startswith(ours) or name == CACHE}
        mine = {"PATH": f"{self.python.parent}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
        pip = {"PIP_CONFIG_FILE": os.devnull, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_ROOT_USER_ACTION": "ignore"}
        return subprocess.run(
            [str(word) for word in command], cwd=cwd or self.folder, env={**kept, **mine, **pip, **variables},
            capture_output=True, text=True, timeout=timeout, check=False,
        )  # fmt: skip

    def install(self, *names):
        """Install distributions from wheels, or a project from its folder."""
        done = self.run("pip", "install", *names)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="session")
def members():
    """Folders of this tree that become distributions."""
    return sorted(path.parent for pattern in PATTERNS for path in ROOT.glob(f"{pattern}/pyproject.toml"))


@pytest.fixture(scope="session")
def dist(tmp_path_factory, members):
    """A folder with the wheel of every member, made once for all processes of this run."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "dist"
    made = folder.with_suffix(".made")
    with FileLock(folder.with_suffix(".lock")):
        if not made.exists():
            _make_wheels(folder, members)
            made.touch()
    return folder


def _make_wheels(folder, members):
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    command += ["--disable-pip-version-check", "-w", str(folder)]
    subprocess.run([*command, *map(str, members)], check=True, cwd=ROOT, timeout=300)  # kernels are compiled


@pytest.fixture(scope="session")
def links(tmp_path_factory):
    """A folder of links to all that is installed here, but for polyscale."""
    folder = tmp_path_factory.mktemp("links")
    for place in dict.fromkeys([*site.getsitepackages(), sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]):
        for entry in Path(place).iterdir() if Path(place).is_dir() else ():
            ours = entry.name.startswith(("polyscale", "__editable__", "_polyscale"))
            if not (ours or entry.suffix == ".pth" or (folder / entry.name).exists()):
                (folder / entry.name).symlink_to(entry)
    return folder


@pytest.fixture(scope="session")
def clean_environment(dist, links):
    """Makes an environment in a folder, with some distributions installed from ``dist`` alone."""

    def make(folder, *names):
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=60)
        made = Environment(folder, folder / "bin" / "python")
        found = made.run(made.python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))")
        (Path(found.stdout.strip()) / "links.pth").write_text(f"{links}\n")
        pip = folder / "bin" / "pip"
        pip.write_text(PIP.format(dist=dist, outer=sys.executable, python=made.python))
        pip.chmod(0o755)
        made.install(*names)
        return made

    return make
