"""The example script, unchanged, under ``scale run`` on two simulated devices."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from polyscale.testing.output import without_name_service

SCRIPT = Path(__file__).resolve().parents[3] / "docs" / "examples" / "train_gpt.py"
GPT2 = {"model_type": "gpt2", "vocab_size": 300, "n_positions": 32, "n_layer": 1, "n_embd": 16, "n_head": 2}
ARGUMENTS = ["--model", json.dumps(GPT2), "--batch", "2", "--length", "32", "--validation", "8"]


def run(*arguments):
    command = [sys.executable, "-m", "polyscale", "run", "--nproc", "2", str(SCRIPT), *ARGUMENTS, *arguments]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "POLYSCALE_ACCELERATOR": "sim", "POLYSCALE_SIM_LATE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, env=environ, check=False)
    assert done.returncode == 0, done.stderr
    assert without_name_service(done.stderr) == ""
    return [json.loads(line.removeprefix("[rank 0] ")) for line in done.stdout.splitlines()]


def validation(records):
    return [record["validation_loss"] for record in records if "validation_loss" in record]


@pytest.mark.long
def test_the_example_trains_with_late_work_and_goes_on_at_another_stage(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("\n".join(f"The value of {n} times {n} is {n * n}." for n in range(400)), encoding="utf-8")
    shared = ["--text", str(text), "--out", str(tmp_path / "run")]
    first = run(*shared, "--stage", "3", "--steps", "3")
    assert [record["step"] for record in first if "loss" in record] == [1, 2, 3]
    assert validation(first)[0] == pytest.approx(math.log(300), abs=0.3)
    assert validation(first)[-1] < validation(first)[0]
    later = run(*shared, "--stage", "0", "--steps", "5", "--resume")
    assert [record["step"] for record in later if "loss" in record] == [4, 5]
    assert validation(later)[0] == pytest.approx(validation(first)[-1], abs=1e-4)
