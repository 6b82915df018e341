"""The rules that keep the tree as DESIGN says: thin imports, few public names, one reader of the environment each."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import polyscale

ROOT = Path(__file__).parent.parent
MEMBERS = sorted(
    path.parent for path in ROOT.glob("**/pyproject.toml") if ".venv" not in path.parts and path.parent != ROOT
)

PUBLIC = [
    "CheckpointError",
    "Config",
    "ConfigError",
    "Engine",
    "PluginContext",
    "PluginError",
    "PolyscaleError",
    "RankError",
    "Topology",
    "UnsupportedError",
    "__version__",
    "data",
    "hookimpl",
    "initialize",
    "load_config",
    "partitioned_init",
]

ENGINE = [
    "backward", "clip_factor", "close", "dtypes", "eval", "eval_batch", "export", "flush", "grad_norm",
    "gradient_accumulation_steps", "learning_rates", "load", "loss_scale", "memory", "no_sync", "save", "step", "track",
    "train", "train_batch",
]  # fmt: skip


def _sources():
    for member in MEMBERS:
        for path in member.glob("*/**/*.py"):
            if not {"tests", "docs", "examples", "build"} & set(path.relative_to(ROOT).parts):
                yield path


def test_public_names_are_frozen():
    assert sorted(polyscale.__all__) == PUBLIC
    for name in PUBLIC:
        assert getattr(polyscale, name) is not None


def test_methods_of_the_engine_are_frozen():
    assert sorted(name for name in vars(polyscale.Engine) if not name.startswith("_")) == ENGINE


def _run(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120).stdout


def test_importing_polyscale_loads_no_torch_and_says_nothing():
    code = (
        "import sys, threading, polyscale, polyscale.discovery; "
        "print([m for m in sys.modules if m == 'torch'], threading.active_count())"
    )
    assert _run(code).strip() == "[] 1"


def test_initialize_is_imported_without_what_is_used_later():
    late = (
        "torch.distributed.fsdp",
        "torch.distributed.checkpoint",
        "torch.distributed.pipelining",
        "transformers",
        "tensorboard",
    )
    code = f"import sys, polyscale; polyscale.initialize; print([m for m in {late!r} if m in sys.modules])"
    assert _run(code).strip() == "[]"


@pytest.mark.parametrize("path", list(_sources()), ids=lambda path: str(path.relative_to(ROOT)))
def test_house_rules(path):
    tree = ast.parse(path.read_text())
    where = path.relative_to(ROOT)
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            pytest.fail(f"{where}:{node.lineno}: global")
        if isinstance(node, ast.ImportFrom) and any(alias.name == "*" for alias in node.names):
            pytest.fail(f"{where}:{node.lineno}: import *")
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
            speaks = where.parts[0] == "entrypoints" or path.name == "__main__.py"
            assert speaks, f"{where}:{node.lineno}: libraries do not print"
        reads = isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv")
        if reads and isinstance(node.value, ast.Name) and node.value.id == "os":
            assert path.name in ("env.py", "environment.py") or "testing" in where.parts, (
                f"{where}:{node.lineno}: os.environ"
            )
        private = isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch")
        if private and ("._" in (node.module or "") or any(a.name.startswith("_") for a in node.names)):
            assert path.name == "_torch.py", f"{where}:{node.lineno}: a private name of torch"
    assert len(path.read_text().splitlines()) <= 500, (
        f"{where} has more than 500 lines: what is the second thing in it?"
    )
    assert ast.get_docstring(tree), f"{where} has no docstring"


@pytest.mark.parametrize("member", MEMBERS, ids=lambda member: str(member.relative_to(ROOT)))
def test_members_have_their_own_package_and_tests(member):
    text = (member / "pyproject.toml").read_text()
    assert "[project]" in text
    assert (member / "tests").is_dir() or "examples" in member.parts, f"{member} has no tests"
