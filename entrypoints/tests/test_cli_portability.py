"""Both commands without the modules that Windows lacks, and polyscale's own modules under ``sys.platform`` win32."""

import subprocess
import sys

import pytest

BLOCK = """
import sys
for name in ("fcntl", "resource", "pwd", "grp", "termios"):
    sys.modules.pop(name, None)
    sys.modules[name] = None
try:
    import fcntl
except ImportError:
    pass
else:
    raise AssertionError("not blocked")
"""
COMMANDS = """
import contextlib, io, json
def told(*words):
    from polyscale_cli.main import main
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = main(words)
    assert code == 0, (words, code, out.getvalue())
    return out.getvalue()
report = json.loads(told("report", "--json"))
assert [row["name"] for row in report["accelerators"] if row["selected"]], report["accelerators"]
configuration = json.dumps({"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}})
assert "can be used" in told("config", "check", configuration)
"""
WINDOWS = """
import importlib, pkgutil
import numpy, packaging.requirements, packaging.version, pluggy, pydantic, rich.console, rich.table, safetensors.torch
import stevedore.driver, typer, typer.main
import torch, torch.distributed, torch.distributed.checkpoint, torch.distributed.fsdp, torch.distributed.tensor
import torch.distributed.elastic.agent.server.local_elastic_agent, torch.distributed.elastic.rendezvous.registry
import torch.nn.parallel, torch.utils.data, torch.utils.tensorboard
typer.main.get_command(typer.Typer(callback=lambda: None)).main(args=["--help"], standalone_mode=False)

class Model(pydantic.BaseModel):  # pydantic imports most of itself at the first model
    field: int = pydantic.Field(1, ge=0)

before = {name for name in sys.modules if name.startswith("polyscale")}
assert not before, before
sys.platform = "win32"
failed = {}
for package in ("polyscale", "polyscale_cli", "polyscale_cpu", "polyscale_cuda", "polyscale_standard"):
    for found in pkgutil.walk_packages([*importlib.import_module(package).__path__], package + "."):
        if not found.name.endswith("__main__"):
            try:
                importlib.import_module(found.name)
            except BaseException as error:
                failed[found.name] = repr(error)
assert not failed, failed
"""
FUNCTIONS = """
from polyscale_cli.report.system import system_facts
assert len(system_facts()) == 6
from polyscale.discovery import load
assert "Windows" in load("launcher", "local").why_unavailable()
"""


def run(code):
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_commands_work_without_the_modules_that_windows_lacks():
    run(BLOCK + COMMANDS)


@pytest.mark.long
def test_modules_import_and_both_commands_run_where_the_platform_is_windows():
    run("import sys" + WINDOWS + COMMANDS + FUNCTIONS)
