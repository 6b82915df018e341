"""What an engine tells: events, the printed line, times, and observers that misbehave."""

import json
import logging

import pytest
import torch
from torch import nn

import polyscale
from polyscale.testing import ranks


def _config(folder, **extra):
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "backends": {"options": {"jsonl": {"path": f"{folder}/events.jsonl"}}},
        "tensorboard": {"enabled": True, "output_path": str(folder), "job_name": "job"},
        "wall_clock_breakdown": True,
        "steps_per_print": 2,
        **extra,
    }


def _train(folder):
    with polyscale.initialize(nn.Linear(2, 1), config=_config(folder)) as engine:
        for value in range(8):
            engine.backward(engine(torch.full((2, 2), float(value))).mean())
            engine.step()
        engine.save(f"{folder}/ckpt")


def test_events_are_written_once_by_rank_0(tmp_path):
    ranks(2).run(_train, str(tmp_path))
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    kinds = [event["event"] for event in events]
    assert kinds == ["EngineStarted", *["StepTaken"] * 4, "CheckpointSaved", "EngineClosed"]
    steps = [event for event in events if event["event"] == "StepTaken"]
    assert [event["step"] for event in steps] == [1, 2, 3, 4]
    assert [event["samples"] for event in steps] == [8, 16, 24, 32]
    for event in steps:
        assert event["lr"] == [0.1]
        assert event["grad_norm"] > 0
        assert set(event["seconds"]) == {"forward", "backward", "step"}
    assert list((tmp_path / "job").glob("events.out.tfevents.*"))


def test_the_printed_line(tmp_path, caplog):
    with caplog.at_level(logging.INFO, logger="polyscale"):
        _train(str(tmp_path))
    lines = [record.message for record in caplog.records if record.message.startswith("step ")]
    assert len(lines) == 2 and lines[0].startswith("step 2 samples 8 loss")
    assert "master fp32" in caplog.text


def test_tracked_objects_are_checked():
    with polyscale.initialize(nn.Linear(2, 1), config={"train_batch_size": 1}) as engine:
        with pytest.raises(polyscale.PolyscaleError, match="state_dict"):
            engine.track("counter", object())
        engine.track("model", engine.module)
        with pytest.raises(polyscale.PolyscaleError, match="name"):
            engine.track("model", nn.Linear(1, 1))
