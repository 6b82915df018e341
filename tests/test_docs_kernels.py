"""The distribution of docs/kernels.md, built as a wheel and used as printed there, and the commands of the page."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from polyscale.testing.kernel_modules import find_compiler

ROOT = Path(__file__).parents[1]
MANUAL = ROOT / "docs" / "kernels.md"
TEXT = MANUAL.read_text("utf-8")
PROJECT = "acme-ema"


def _blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", TEXT, flags=re.DOTALL | re.MULTILINE)


def _files():
    return re.findall(r"^`([\w./-]+)`:\n\n```\w+\n(.*?)^```", TEXT, flags=re.DOTALL | re.MULTILINE)


def _write_project(folder):
    """Write every block that is preceded by a path into ``folder``."""
    for path, text in _files():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text, "utf-8")
    assert {path.partition("/")[0] for path, _ in _files()} == {PROJECT}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Runs commands where the distribution is installed from the wheel that the page's own line builds."""
    find_compiler()
    folder = tmp_path_factory.mktemp("kernels")
    _write_project(folder)
    target = folder / "installed"
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    pip = {"PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_ROOT_USER_ACTION": "ignore"}
    env = {**os.environ, **pip, "PYTHONPATH": str(target), "PATH": path, "OMP_NUM_THREADS": "1"}

    def run(*command, **variables):
        command = [sys.executable, "-m", *command] if command[0] == "pip" else command
        done = subprocess.run(
            command, env={**env, **variables}, cwd=folder, capture_output=True, text=True, timeout=200, check=False
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        return done.stdout

    (line,) = (line for block in _blocks("sh") for line in block.splitlines() if line.startswith("pip wheel"))
    run(*shlex.split(line))
    (wheel,) = folder.glob("acme_ema-1.0-*.whl")
    assert not wheel.name.endswith("-none-any.whl")
    run("pip", "install", "-q", "--no-deps", "--target", str(target), str(wheel))
    return run


@pytest.mark.long
def test_the_op_of_the_page_does_what_the_page_says(run):
    printed = [text for _, text in _files()]
    (use,) = [block for block in _blocks("python") if block not in printed]
    check = """
import polyscale.ops
torch.manual_seed(0)
pairs = [(torch.randn(5), torch.randn(5)), (torch.randn(4, 4).t(), torch.randn(4, 4)), (torch.randn(0),) * 2]
for average, value in pairs:
    expected = 0.75 * average.double() + 0.25 * value.double()
    ema(average, value, 0.75)
    assert torch.allclose(average.double(), expected, atol=1e-6)
torch.library.opcheck(ema.default, (torch.randn(3), torch.randn(3), 0.5))
(module,) = [module for module in polyscale.ops.modules() if module.name == "acme_ema"]
print(polyscale.ops.status(module).state)
"""
    assert run(sys.executable, "-W", "error", "-c", use + check) == "prebuilt\n"


@pytest.mark.long
def test_the_commands_of_the_page_work(run, tmp_path):
    """``pip install`` is what the fixture did, from the wheel."""
    done = 0
    for line in (line for block in _blocks("sh") for line in block.splitlines()):
        if line.startswith("scale"):
            out = run(*shlex.split(line), POLYSCALE_CACHE=str(tmp_path))
            done += 1
            if line == "scale build acme_ema_":
                assert out == "acme_ema (cpu): prebuilt\n"
            if line.endswith("--kind op") or line == "scale build":
                assert "acme_ema" in out and "prebuilt" in out
        else:
            assert line.startswith("pip")
    assert done == 4
    assert "Nothing to remove" in run("scale", "clean", POLYSCALE_CACHE=str(tmp_path))


def test_every_command_of_the_table_is_one(capsys):
    from polyscale_cli.main import main

    named = {words.split()[1] for words in re.findall(r"^\| `(scale [^`]+)`", TEXT, flags=re.MULTILINE)}
    assert named == {"build", "clean"}
    for name in named:
        assert main([name, "--help"]) == 0
    options = set(re.findall(r"--[a-z]+", " ".join(re.findall(r"^\| `(scale build[^`]*)`", TEXT, flags=re.MULTILINE))))
    main(["build", "--help"])
    assert options <= set(re.findall(r"--[a-z]+", capsys.readouterr().out))
