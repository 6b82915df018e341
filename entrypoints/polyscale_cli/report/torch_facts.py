"""Whether torch can be imported and, if not, what breaks it.

Notable: torch loads every entry point of group ``torch.backends`` while it is imported, so one broken package of that
kind breaks ``import torch`` for everybody. Only after an import has failed is a second process asked to import torch
without them and to try each one.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys

from polyscale_cli import env
from polyscale_cli.report.model import TorchFacts

_PROBE = """
import importlib.metadata as m, json, sys
try:
    import torch
except BaseException as e:
    print(json.dumps({"torch": f"{type(e).__name__}: {e}"})); sys.exit()
bad = []
for p in m.entry_points(group="torch.backends"):
    try:
        p.load()()
    except BaseException as e:
        bad.append([p.name, p.dist.name if p.dist else "", f"{type(e).__name__}: {e}"])
print(json.dumps({"version": torch.__version__, "bad": bad}))
"""
_TIMEOUT_S = 120


def torch_facts() -> TorchFacts:
    """Import torch, and find out what breaks it when that fails."""
    try:
        with contextlib.redirect_stdout(sys.stderr):
            import torch
    except (KeyboardInterrupt, MemoryError):
        raise
    except BaseException as error:  # a vendor's module may call exit
        return TorchFacts(None, explain_failure(f"{type(error).__name__}: {error}"))
    return TorchFacts(torch.__version__)


def explain_failure(error: str) -> str:
    """Say why ``import torch`` fails and what to do.

    Args:
        error: what this process got.
    """
    try:
        probe = subprocess.run(
            [sys.executable, "-c", _PROBE],
            env=env.without_autoload(),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_S,
            check=False,
        )
        found = json.loads(probe.stdout.strip().splitlines()[-1])
    except (OSError, subprocess.TimeoutExpired, ValueError, IndexError):
        return f"torch cannot be imported ({_line(error)}). Reinstall it: pip install --force-reinstall torch"
    if "torch" in found:
        fix = "Install it: pip install torch" if "No module named 'torch'" in found["torch"] else "Reinstall it"
        return f"torch cannot be imported ({_line(found['torch'])}). {fix}"
    if not found["bad"]:
        return f"torch cannot be imported ({_line(error)}), though it can without its out-of-tree backends"
    return ". ".join(
        f"torch cannot be imported because of the package {distribution or name} (torch.backends entry point {name}: "
        f"{_line(why)}). Run: pip uninstall {distribution or name}, or set TORCH_DEVICE_BACKEND_AUTOLOAD=0"
        for name, distribution, why in found["bad"]
    )


def _line(text: str) -> str:
    return " ".join(text.split())[:300]
