"""Observers: what they write, read back by other programs' readers."""

import json
import subprocess
import sys
import textwrap

import pytest

from polyscale import PluginContext, load_config
from polyscale.errors import ConfigError, PolyscaleError
from polyscale.interfaces.observer import CheckpointSaved, EngineClosed, EngineStarted, Observer, StepTaken
from polyscale_standard.observers import JsonlPlugin, TensorBoardPlugin


def jsonl(**options):
    observer = JsonlPlugin().polyscale_observer(PluginContext("jsonl", options=options))
    assert isinstance(observer, Observer)
    return observer


def tensorboard(**section):
    config = load_config({"train_batch_size": 1, "tensorboard": section})
    observer = TensorBoardPlugin().polyscale_observer(PluginContext("tensorboard", config=config))
    assert isinstance(observer, Observer)
    return observer


def test_jsonl_writes_one_line_per_event(tmp_path):
    path = tmp_path / "logs" / "events.jsonl"
    observer = jsonl(path=str(path))
    assert observer.enabled()
    assert not path.parent.exists()
    observer.on_event(EngineStarted(2, 0, "ddp", 0, 10, {"master": "float32"}))
    observer.on_event(StepTaken(1, 8, 2.5, (0.1, 0.2), grad_norm=float("nan"), seconds={"forward": 0.5}))
    lines = [json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()]
    assert [line.pop("event") for line in lines] == ["EngineStarted", "StepTaken"]
    assert lines[0].pop("time") <= lines[1].pop("time")
    assert lines[0] == {
        "world_size": 2,
        "rank": 0,
        "data_parallel": "ddp",
        "stage": 0,
        "parameters": 10,
        "dtypes": {"master": "float32"},
    }
    assert lines[1] == {
        "step": 1,
        "samples": 8,
        "loss": 2.5,
        "lr": [0.1, 0.2],
        "grad_norm": "nan",
        "clip_factor": 1.0,
        "loss_scale": 1.0,
        "skipped": False,
        "seconds": {"forward": 0.5},
    }
    observer.close()
    observer.close()


def test_jsonl_goes_on_with_a_file_that_is_there(tmp_path):
    for step in (1, 2):
        observer = jsonl(path=str(tmp_path / "x"))
        observer.on_event(EngineClosed(step))
        observer.close()
    assert [json.loads(line)["step"] for line in (tmp_path / "x").read_text().splitlines()] == [1, 2]


def test_jsonl_is_off_without_a_path_and_refuses_other_options(tmp_path):
    off = jsonl()
    assert not off.enabled()
    off.on_event(EngineClosed(1))
    off.close()
    with pytest.raises(ConfigError, match="Did you mean 'path'"):
        jsonl(paht="x")
    with pytest.raises(ConfigError, match="path=3"):
        jsonl(path=3)
    with pytest.raises(PolyscaleError, match=f"{tmp_path}.*Is a directory"):
        jsonl(path=str(tmp_path)).on_event(EngineClosed(1))


def test_tensorboard_reads_back_what_was_written_over_samples(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    observer = tensorboard(enabled=True, output_path=str(tmp_path), job_name="job")
    assert observer.enabled()
    observer.on_event(EngineStarted(1, 0, "ddp", 0, 10))
    observer.on_event(StepTaken(1, 8, 2.5, (0.5, 0.25), 4.0, loss_scale=256.0, seconds={"forward": 0.5, "step": 0.25}))
    observer.on_event(StepTaken(1, 16, 2.25, (0.5, 0.25), loss_scale=128.0, skipped=True))
    observer.on_event(StepTaken(2, 24, None, (0.125, 0.25), loss_scale=128.0))
    observer.on_event(CheckpointSaved("x", 2, 0.1))
    observer.close()
    observer.close()
    reader = EventAccumulator(str(tmp_path / "job"))
    reader.Reload()
    written = {tag: [(event.step, event.value) for event in reader.Scalars(tag)] for tag in reader.Tags()["scalars"]}
    assert written == {
        "Train/Samples/train_loss": [(8, 2.5), (16, 2.25)],
        "Train/Samples/loss_scale": [(8, 256.0), (16, 128.0), (24, 128.0)],
        "Train/Samples/lr": [(8, 0.5), (24, 0.125)],
        "Train/Samples/lr_group_1": [(8, 0.25), (24, 0.25)],
        "Train/Samples/grad_norm": [(8, 4.0)],
        "Train/Samples/elapsed_time_ms_forward": [(8, 500.0)],
        "Train/Samples/elapsed_time_ms_step": [(8, 250.0)],
    }


def test_tensorboard_is_off_unless_enabled(tmp_path):
    off = tensorboard(output_path=str(tmp_path))
    assert not off.enabled()
    off.on_event(StepTaken(1, 8, 2.5, (0.5,)))
    off.close()
    assert list(tmp_path.iterdir()) == []
    assert not TensorBoardPlugin().polyscale_observer(PluginContext("tensorboard")).enabled()


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    observer = tensorboard(enabled=True, output_path=str(tmp_path / "file"))
    with pytest.raises(PolyscaleError, match=f"{tmp_path}/file"):
        observer.on_event(StepTaken(1, 8, 2.5, (0.5,)))


def test_loading_and_asking_imports_no_torch_and_no_tensorboard():
    code = """
        import sys
        from polyscale.hooks import PluginContext
        from polyscale_standard import io, observers, optimizers, precision
        for plugin in (observers.JsonlPlugin, observers.TensorBoardPlugin):
            assert not plugin().polyscale_observer(PluginContext("x")).enabled()
        optimizers.AdamWPlugin().polyscale_optimizer(PluginContext("x")).check({"lr": 1.0})
        precision.Fp16Plugin().polyscale_precision(PluginContext("x")).scaler()
        io.ThreadsPlugin().polyscale_io(PluginContext("x")).close()
        print(sorted({"torch", "tensorboard", "numpy"} & set(sys.modules)))
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("[]\n", "")
