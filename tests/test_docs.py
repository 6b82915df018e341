"""README and docs: the commands and the Python in them run, links lead somewhere, and tables agree with the code."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from polyscale.testing import ranks
from polyscale_sim.accelerator import SimAccelerator

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = sorted([README, *(ROOT / "docs").rglob("*.md")])
# Their commands need their plugins: test_docs_plugins.py, test_docs_kernels.py and test_third_party.py run them, and
# their Python.
ELSEWHERE = (
    "docs/adding-a-plugin.md", "docs/kernels.md", "docs/vendors.md", "docs/examples/third-party-accelerator/README.md",
)  # fmt: skip
SLOW = ("python", "torchrun")


def _read(page):
    return page.read_text("utf-8")


def _blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```", _read(page), flags=re.DOTALL | re.MULTILINE)


def _commands(page):
    lines = [line for block in _blocks(page, "sh") for line in block.splitlines()]
    return [line for line in lines if line.strip()]


def _all_commands():
    return [(page, line) for page in PAGES if str(page.relative_to(ROOT)) not in ELSEWHERE for line in _commands(page)]


def _members():
    """Distribution name -> the text of its pyproject.toml."""
    files = [ROOT / "pyproject.toml", *ROOT.glob("*/pyproject.toml"), *ROOT.glob("*/*/pyproject.toml")]
    texts = [_read(file) for file in files if not set(file.relative_to(ROOT).parts) & {".venv", "dist", "runs"}]
    return {re.search(r'^name = "(.+)"$', text, flags=re.MULTILINE)[1]: text for text in texts}


# Form.


def test_the_readme_is_short_and_begins_with_a_short_example():
    assert len(_read(README).splitlines()) <= 150
    assert re.match(r"# \w+\n\n```python\n", _read(README))
    assert len(_blocks(README, "python")[0].splitlines()) <= 12


def _slug(heading):
    text = re.sub(r"\[(.*?)\]\(.*?\)", r"\1", heading).strip().lower()
    return re.sub(r"[^\w\- ]", "", text).replace(" ", "-")


def _anchors(page):
    return {_slug(heading) for heading in re.findall(r"^#+ (.+)$", _read(page), flags=re.MULTILINE)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    text = re.sub(r"^```.*?^```", "", _read(page), flags=re.DOTALL | re.MULTILINE)
    for target in re.findall(r"\[[^\]]*\]\(([^)\s]+)\)", text):
        if re.match(r"\w+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in _anchors(file), f"{page.name} links to {target}"


def test_every_page_can_be_reached_from_the_index():
    index = ROOT / "docs" / "index.md"
    linked = {(index.parent / target).resolve() for target in re.findall(r"\]\(([^)#]+)\)", _read(index))}
    assert {page.resolve() for page in PAGES} - linked - {index.resolve()} == set()


# Commands.


def test_every_make_target_exists():
    targets = set(re.findall(r"^([\w-]+):", _read(ROOT / "Makefile"), flags=re.MULTILINE))
    named = {word for page, line in _all_commands() if line.startswith("make ") for word in line.split()[1:]}
    assert {"demo", "test", "wheels"} <= named <= targets


def test_pip_lines_name_distributions_of_this_tree():
    members = _members()
    lines = [shlex.split(line) for _, line in _all_commands() if line.startswith("pip ")]
    removed = {word for words in lines if words[1] == "uninstall" for word in words[2:]}
    assert set(members) <= removed, "they remove everything"
    for words in lines:
        named = [word for word in words[2:] if not word.startswith("-") and word != "dist"]
        assert named
        for name, extra in (re.fullmatch(r"([\w-]+)(?:\[(\w+)\])?", word).groups() for word in named):
            assert name in members, " ".join(words)
            assert extra is None or re.search(rf"^{extra} = \[", members[name], flags=re.MULTILINE), " ".join(words)
        if words[1] == "install" and "[" not in " ".join(words):
            assert "--find-links dist" in " ".join(words)


def _environment():
    mine = {"OMP_NUM_THREADS": "1", "POLYSCALE_TIMEOUT": "60", "PYTHONWARNINGS": "error"}
    return {**os.environ, **mine, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}


def _run(line, folder):
    words = ["bash", "-c", line]
    done = subprocess.run(words, cwd=folder, env=_environment(), capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
    return done.stdout


def _example(folder):
    (folder / "train.py").write_text(_blocks(README, "python")[0], "utf-8")


def test_commands_that_need_no_process_of_their_own(tmp_path, monkeypatch, capsys):
    from polyscale_cli import main

    monkeypatch.chdir(tmp_path)
    done = set()
    for page, line in _all_commands():
        words = shlex.split(line, comments=True)
        if words[:2] == ["scale", "run"] or words[0] in ("make", "pip", *SLOW) or tuple(words) in done:
            continue
        done.add(tuple(words))
        assert words[0] in ("scale", "scale-report"), f"{page.name}: nothing runs {line!r}"
        entry = main.main if words[0] == "scale" else main.report_main
        assert entry(words[1:]) == 0, f"{page.name}: {line}\n{capsys.readouterr()}"
    assert ("scale-report",) in done and len(done) >= 4


def test_scale_run_trains_the_example_on_two_ranks(tmp_path):
    _example(tmp_path)
    lines = {line for _, line in _all_commands() if line.startswith("scale run ")}
    assert lines == {"scale run --nproc 2 train.py"}
    _run(lines.pop(), tmp_path)
    assert _read(tmp_path / "checkpoints" / "latest") == "step-100\n"
    assert (tmp_path / "checkpoints" / "step-100" / "rank-1.pt").exists()


@pytest.mark.long
def test_the_other_ways_to_start_the_example(tmp_path):
    _example(tmp_path)
    lines = {line for _, line in _all_commands() if line.startswith(SLOW)}
    assert {line.split()[0] for line in lines} == set(SLOW)
    for line in sorted(lines):
        _run(line, tmp_path)


# Python.


def run_blocks(blocks, folder, **given):
    """Run Python blocks one after the other in one namespace; collective."""
    import __future__

    os.chdir(folder)
    namespace = {"__name__": "docs", **given}
    for number, block in enumerate(blocks):
        exec(compile(block, f"block {number}", "exec", __future__.annotations.compiler_flag), namespace)


def run_blocks_with_a_model(blocks, folder):
    import torch

    run_blocks(blocks, folder, model=torch.nn.Linear(4, 4))


def test_the_example_of_the_readme(tmp_path):
    ranks(2).run(run_blocks, _blocks(README, "python"), str(tmp_path))
    assert (tmp_path / "checkpoints" / "step-100").is_dir()


def test_the_python_of_the_training_manual(tmp_path):
    ranks(2).run(run_blocks, _blocks(ROOT / "docs" / "training.md", "python"), str(tmp_path))
    events = _read(tmp_path / "events.jsonl").splitlines()
    assert len(events) == 3 and "StepTaken" in events[1]


def test_the_python_of_the_configuration_and_hooks_manuals(tmp_path):
    configuration, hooks = ROOT / "docs" / "configuration.md", ROOT / "docs" / "hooks.md"
    (tmp_path / "zero2.json").write_text(_blocks(configuration, "json")[0], "utf-8")
    ranks(2).run(run_blocks_with_a_model, _blocks(configuration, "python"), str(tmp_path))
    ranks(2).run(run_blocks, _blocks(hooks, "python"), str(tmp_path))  # they define, and are checked elsewhere


def test_the_python_of_the_page_of_the_simulated_device(tmp_path):
    if why := SimAccelerator().why_unavailable():
        pytest.skip(why)
    ranks(1, accelerator="sim").run(run_blocks, _blocks(ROOT / "docs" / "sim.md", "python"), str(tmp_path))


def test_no_page_has_python_that_nothing_runs():
    with_python = {page.name for page in PAGES if _blocks(page, "python")}
    # test_memory_formulas.py runs that of memory.md
    described = "README training configuration hooks adding-a-plugin kernels vendors sim memory"
    assert with_python == {f"{name}.md" for name in described.split()}
