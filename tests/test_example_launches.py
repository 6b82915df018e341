"""``docs/examples/train_gpt.py``: the same file under python, torchrun and ``scale run``, and what it does wrong."""

import json
import math
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from polyscale.testing.output import without_name_service

SCRIPT = Path(__file__).resolve().parent.parent / "docs" / "examples" / "train_gpt.py"
TEXT = "\n".join(f"The value of {n} times {n} is {n * n}; the sum of {n} and {n} is {n + n}." for n in range(400))
GPT2 = {"model_type": "gpt2", "vocab_size": 300, "n_positions": 32, "n_layer": 1, "n_embd": 16, "n_head": 2}
LLAMA = {
    "model_type": "llama",
    "vocab_size": 300,
    "max_position_embeddings": 32,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
SIZES = ["--length", "32", "--validation", "8"]


@pytest.fixture
def text(tmp_path):
    halves = TEXT[: len(TEXT) // 2], TEXT[len(TEXT) // 2 :]
    files = [tmp_path / "first.txt", tmp_path / "second.txt"]
    for file, half in zip(files, halves, strict=True):
        file.write_text(half, encoding="utf-8")
    return [str(file) for file in files]


def run(command, *arguments):
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "POLYSCALE_ACCELERATOR": "cpu"}
    return subprocess.run(
        [sys.executable, *command, *arguments], capture_output=True, text=True, timeout=120, env=environ, check=False
    )


def records(done):
    """What rank 0 printed; nothing else may have been."""
    assert done.returncode == 0, done.stderr
    assert without_name_service(done.stderr) == ""
    return [json.loads(line.removeprefix("[rank 0] ")) for line in done.stdout.splitlines()]


def validation(found):
    return [record["validation_loss"] for record in found if "validation_loss" in record]


@pytest.mark.long
def test_trains_under_python_and_goes_on_under_scale_run_on_two_ranks_at_another_stage(tmp_path, text):
    out, model = str(tmp_path / "run"), json.dumps(GPT2)
    shared = ["--text", *text, "--model", model, "--batch", "2", *SIZES, "--out", out]
    alone = records(run([str(SCRIPT)], *shared, "--steps", "3"))
    assert validation(alone)[0] == pytest.approx(math.log(300), abs=0.3)
    assert validation(alone)[-1] < validation(alone)[0]
    assert [record["step"] for record in alone if "loss" in record] == [1, 2, 3]
    assert alone[-1]["sentence"].startswith("The value of")

    launcher = ["-m", "polyscale", "run", "--nproc", "2", str(SCRIPT)]
    together = records(run(launcher, *shared, "--stage", "2", "--steps", "5", "--resume"))
    assert [record["step"] for record in together if "loss" in record] == [4, 5]
    assert validation(together)[0] == pytest.approx(validation(alone)[-1], abs=1e-4)


@pytest.mark.long
def test_another_model_from_a_file_under_torchrun_with_a_configuration_of_ones_own(tmp_path, text):
    (tmp_path / "model.json").write_text(json.dumps(LLAMA))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": 3},
    }
    (tmp_path / "ds.json").write_text(json.dumps(config))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-addr", "127.0.0.1"]
    launcher += ["--master-port", str(port), str(SCRIPT), "--text", *text, "--model", str(tmp_path / "model.json")]
    found = records(
        run(launcher, "--config", str(tmp_path / "ds.json"), *SIZES, "--steps", "2", "--out", str(tmp_path))
    )
    assert [record["step"] for record in found if "loss" in record] == [1, 2]
    assert validation(found)[0] == pytest.approx(math.log(300), abs=0.3)
    assert "sentence" in found[-1]


@pytest.mark.long
def test_a_folder_with_a_run_is_not_overwritten(tmp_path):
    (tmp_path / "checkpoint").mkdir()
    done = run([str(SCRIPT)], "--out", str(tmp_path))
    assert done.returncode == 2
    assert "--resume" in done.stderr
    assert "Traceback" not in done.stderr


def test_it_is_short_enough_to_read_and_copy():
    assert len(SCRIPT.read_text(encoding="utf-8").splitlines()) < 120
