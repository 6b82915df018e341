"""``make demo``: the run itself, shortened; the judging of outcomes; the baselines."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from importlib import util
from itertools import pairwise
from pathlib import Path

import pytest
import torch

TOOLS = Path(__file__).resolve().parent.parent / "tools"
KEYS = [
    "val_loss_first",
    "val_loss_last",
    "unigram_loss",
    "bigram_loss",
    "tokens_per_s",
    "world_size",
    "stage",
    "resumed_val_loss",
    "seconds",
]


def tool(name):
    spec = util.spec_from_file_location(f"polyscale_tools_{name}", TOOLS / f"{name}.py")
    module = util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def demo(*arguments, timeout=240, **environ):
    return subprocess.run(
        [sys.executable, str(TOOLS / "demo.py"), *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, "DEMO_ACCELERATOR": "cpu", **environ},
        check=False,
    )


@pytest.mark.long
def test_some_hundred_updates_get_below_the_bigram_and_write_what_is_promised_and_nothing_else(tmp_path):
    (tmp_path / "checkpoint").mkdir()  # of an earlier run, which is replaced
    done = demo("--steps", "260", "--goal", "bigram", "--out", str(tmp_path), timeout=900)
    assert done.returncode == 0, done.stderr
    *_, last = done.stdout.splitlines()
    result = json.loads(last)
    assert list(result) == KEYS
    assert result == json.loads((tmp_path / "result.json").read_text())
    assert result["val_loss_first"] == pytest.approx(math.log(1024), abs=0.3)
    assert result["val_loss_last"] < result["val_loss_first"]
    assert result["resumed_val_loss"] == pytest.approx(result["val_loss_last"], abs=1e-4)
    assert result["val_loss_last"] < result["bigram_loss"] < result["unigram_loss"] < math.log(1024)
    assert (result["world_size"], result["stage"]) == (2, 2)
    assert result["tokens_per_s"] > 0
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "checkpoint" / "latest").exists()
    said = done.stderr + (tmp_path / "train.log").read_text()
    assert "warn" not in said.lower()
    assert "loss" in said
    assert "tokens/s" in said
    assert "MB" in said


@pytest.mark.parametrize("value", ["0", "two", "-1"])
def test_number_of_ranks_that_is_none(tmp_path, value):
    done = demo("--out", str(tmp_path), DEMO_NPROC=value)
    assert done.returncode == 2
    assert f"DEMO_NPROC={value!r}" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_goal_that_cannot_be_judged_is_refused_before_anything_is_trained(tmp_path):
    done = demo("--out", str(tmp_path), "--goal", "bigramm", timeout=60)
    assert done.returncode == 2
    assert "'bigramm'" in done.stderr and "'bigram'" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_accelerator_that_is_not_there_and_a_folder_that_cannot_be_made(tmp_path):
    done = demo("--out", str(tmp_path), DEMO_ACCELERATOR="cdua")
    assert done.returncode == 2
    assert "cdua" in done.stderr
    assert "Traceback" not in done.stderr
    (tmp_path / "file").write_text("")
    done = demo("--out", str(tmp_path / "file" / "run"))
    assert done.returncode == 2
    assert "Error:" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="reads /proc")
def test_interrupt_ends_the_ranks_and_exits_with_130(tmp_path):
    process = subprocess.Popen(
        [sys.executable, str(TOOLS / "demo.py"), "--out", str(tmp_path), "--steps", "1000", "--goal", "none"],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "DEMO_ACCELERATOR": "cpu"},
    )
    log = tmp_path / "train.log"
    deadline = time.monotonic() + 120
    while not (log.exists() and '"step": 1' in log.read_text()):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.2)
    assert len(processes_of(tmp_path)) >= 3
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "Traceback" not in said
    assert processes_of(tmp_path) == []


def processes_of(folder):
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if str(folder).encode() in entry.read_bytes():
                found.append(entry.parent.name)
        except OSError:
            continue
    return found


GOOD = {"val_loss_first": 6.95, "val_loss_last": 4.7, "resumed_val_loss": 4.7, "bigram_loss": 4.3}


@pytest.mark.parametrize(
    ("changes", "goal", "missed"),
    [
        ({}, "5.0", 0),
        ({}, "none", 0),
        ({}, "bigram", 1),
        ({"val_loss_last": 4.2, "resumed_val_loss": 4.2}, "bigram", 0),
        ({"val_loss_last": 5.0, "resumed_val_loss": 5.0}, "5.0", 1),
        ({"val_loss_first": 6.5}, "5.0", 1),
        ({"resumed_val_loss": 4.7003}, "5.0", 1),
        ({"resumed_val_loss": math.nan}, "5.0", 1),
        ({"val_loss_last": math.nan, "resumed_val_loss": math.nan}, "5.0", 2),
    ],
)
def test_outcomes_are_judged(changes, goal, missed):
    assert len(tool("outcome").judge({**GOOD, **changes}, goal, vocabulary=1024)) == missed


def test_baselines_are_those_of_counting_by_hand():
    generator = torch.Generator().manual_seed(0)
    vocabulary, rows = 5, torch.randint(0, 5, (40, 7), generator=generator)
    rows[:, 1::2] = (
        rows[:, 0::2][:, :3] + 1
    ) % 4  # a token tells the next: a bigram is worth having; 4 comes first only
    training, validation = rows[:30], rows[30:]
    unigram, bigram = tool("baselines").losses(training, validation, vocabulary)

    def by_hand(fitted, scored, weight):
        pairs = Counter((a, b) for row in fitted.tolist() for a, b in pairwise(row))
        seconds, firsts = Counter(), Counter()
        for (a, b), count in pairs.items():
            seconds[b] += count
            firsts[a] += count
        total, losses = sum(seconds.values()) + vocabulary, []
        for row in scored.tolist():
            for a, b in pairwise(row):
                single = (seconds[b] + 1) / total
                mixed = weight * pairs[a, b] / firsts[a] + (1 - weight) * single if firsts[a] else single
                losses.append(-math.log(mixed))
        return sum(losses) / len(losses)

    weights = [step / 20 for step in range(1, 20)]
    best = min(weights, key=lambda weight: by_hand(training[:27], training[27:], weight))
    assert unigram == pytest.approx(by_hand(training, validation, 0.0), abs=1e-12)
    assert bigram == pytest.approx(by_hand(training, validation, best), abs=1e-12)
    assert bigram < unigram
