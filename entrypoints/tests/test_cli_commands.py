"""The commands as users type them: help, versions, mistakes, broken pipes, defects; configurations."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import polyscale
from polyscale import __main__ as twin
from polyscale.config import load_config
from polyscale_cli import boundary
from polyscale_cli.main import main, report_main, without_debug

BIN = Path(sys.executable).parent


def told(capsys, *arguments, call=main):
    code = call(arguments)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_every_name_of_the_command_tells_the_version():
    commands = [[BIN / "scale"], [BIN / "polyscale"], [BIN / "scale-report"], [sys.executable, "-m", "polyscale"]]
    said = {subprocess.check_output([*command, "--version"], text=True) for command in commands}
    assert said == {f"polyscale {polyscale.__version__}\n"}


def test_python_m_polyscale_without_the_command_line_names_its_package(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "polyscale_cli", None)
    monkeypatch.delitem(sys.modules, "polyscale_cli.main", raising=False)
    assert twin.main() == 2
    assert "pip install polyscale-cli" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [[], ["report"], ["run"], ["config"], ["config", "check"], ["config", "init"], ["new"], ["new", "accelerator"]],
)
def test_help_has_an_example(words, capsys):
    code, out, _ = told(capsys, *words, "--help")
    assert code == 0
    assert "Example" in out
    assert "scale " in out.partition("Example")[2]


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["reprot"], "'report'"),
        (["config", "chekc", "x.json"], "'check'"),
        (["report", "--jsn"], "--json"),
        (["report", "--kind", "acelerator"], "'accelerator'"),
        (["run"], "scale run --help"),
        (["run", "--nproc", "two", "x.py"], "--nproc"),
        (["run", "missing.py"], "missing.py"),
        (["run", "--nproc", "0", __file__], "at least one"),
        (["run", "-m", "no_such.train"], "no_such.train"),
        (["report", "--list", "--require", "accelerator=cpu"], "--list"),
        (["config", "init", "--stage", "4"], "0, 1, 2 or 3"),
        (["config", "check", "missing.json"], "missing.json"),
        (["config", "explain", "{"], "JSON"),
    ],
)
def test_a_mistake_is_exit_2_one_error_line_and_no_traceback(words, hint, capsys):
    code, _, err = told(capsys, *words)
    assert code == 2
    assert err.startswith("Error: ")
    assert "Traceback" not in err
    assert hint in err


def test_no_command_shows_the_help(capsys):
    code, out, _ = told(capsys)
    assert code == 2
    assert "Commands:" in out


def test_what_comes_after_run_keeps_its_debug():
    assert without_debug(["--debug", "run", "x.py", "--debug"]) == (True, ["run", "x.py", "--debug"])
    assert without_debug(["report", "--debug"]) == (True, ["report"])
    assert without_debug(["run", "x.py", "--debug"]) == (False, ["run", "x.py", "--debug"])


def test_a_defect_is_exit_1_with_the_traceback_on_demand(capsys, monkeypatch):
    monkeypatch.delenv("POLYSCALE_DEBUG", raising=False)

    def broken():
        raise ZeroDivisionError("division by zero")

    assert boundary.guarded(broken) == 1
    err = capsys.readouterr().err
    assert err.startswith("Error: ZeroDivisionError")
    assert "POLYSCALE_DEBUG=1" in err
    assert "Traceback" not in err
    assert boundary.guarded(broken, debug=True) == 1
    assert "Traceback" in capsys.readouterr().err
    monkeypatch.setenv("POLYSCALE_DEBUG", "1")
    boundary.guarded(broken)
    assert "Traceback" in capsys.readouterr().err


def test_ctrl_c_is_130():
    def interrupted():
        raise KeyboardInterrupt

    assert boundary.guarded(interrupted) == 130


@pytest.mark.parametrize("command", ["scale-report --list", "scale config explain '{}'"])
def test_a_reader_that_goes_away_is_silent(command):
    line = f"{{ sleep 1; {BIN}/{command}; echo $? >&3; }} 3>&2 | true"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False)
    assert done.stderr.split() == ["141"]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_an_initial_configuration_is_valid_and_of_its_stage(stage, tmp_path, capsys):
    path = tmp_path / "zero.json"
    code, out, _ = told(capsys, "config", "init", "--stage", str(stage), "-o", str(path))
    assert code == 0
    assert load_config(path).zero_optimization.stage == stage
    assert told(capsys, "config", "init", "--stage", str(stage))[1] == path.read_text()
    code, out, err = told(capsys, "config", "check", str(path), "--nproc", "2")
    assert (code, err) == (0, "")
    assert "can be used" in out


def test_an_initial_configuration_replaces_a_file_only_when_told(tmp_path, capsys):
    path = tmp_path / "zero.json"
    path.write_text("mine")
    code, _, err = told(capsys, "config", "init", "-o", str(path))
    assert code == 2
    assert "--force" in err
    assert path.read_text() == "mine"
    assert told(capsys, "config", "init", "--force", "-o", str(path))[0] == 0
    assert json.loads(path.read_text())


def test_check_tells_all_errors_at_once(tmp_path, capsys):
    path = tmp_path / "bad.json"
    path.write_text(
        json.dumps({"gradient_acumulation_steps": 4, "zero_optimization": {"stge": 2}, "fp16": {"enabled": True}})
    )
    code, _, err = told(capsys, "config", "check", str(path))
    assert code == 2
    assert err.count("Error: ") == 2
    assert "gradient_accumulation_steps" in err
    assert "zero_optimization.stge" in err


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"backends": {"accelerator": "cdua"}}, ["backends.accelerator", "'cuda'", "pip install"]),
        ({"optimizer": {"type": "AdamX", "params": {}}}, ["AdamX".lower(), "'adam"]),
        ({"optimizer": {"type": "AdamW", "params": {"lrr": 1}}}, ["lrr", "'lr'"]),
        ({"train_batch_size": 7, "train_micro_batch_size_per_gpu": 2}, ["7", "2", "8"]),
    ],
)
def test_check_asks_the_plugins_and_the_batch_arithmetic(values, words, capsys):
    code, _, err = told(capsys, "config", "check", json.dumps({"train_batch_size": 8, **values}), "--nproc", "2")
    assert code == 2
    assert all(word in err for word in words), err


def test_check_notes_what_has_no_effect(capsys):
    code, out, _ = told(capsys, "config", "check", '{"train_batch_size": 8, "disable_allgather": true}')
    assert code == 0
    assert "Note: disable_allgather has no effect here" in out


def test_explain_shows_value_origin_and_what_differs_from_deepspeed(tmp_path, capsys):
    path = tmp_path / "zero.json"
    path.write_text('{"train_batch_size": 8, "zero_optimization": {"stage": 2}}')
    code, out, _ = told(capsys, "config", "explain", str(path))
    assert code == 0
    lines = {line.split(" = ")[0]: line for line in out.splitlines()}
    assert "file" in lines["zero_optimization.stage"]
    assert "DeepSpeed: 0" in lines["zero_optimization.stage"]
    assert "default" in lines["gradient_clipping"]
    assert "DeepSpeed: 1.0" in lines["gradient_clipping"]


def test_explain_in_a_pipe_is_one_line_for_each_value(tmp_path):
    patterns = [f"transformer.h.{number}.attention.*" for number in range(20)]
    config = {"train_batch_size": 8, "data_types": {"keep_in_fp32_modules": patterns}}
    command = [BIN / "scale", "config", "explain", "-"]
    out = subprocess.check_output(command, input=json.dumps(config), text=True, env={"COLUMNS": "40"})
    lines = {line.split(" = ")[0]: line.split("\t") for line in out.splitlines()}
    assert json.loads(lines["data_types.keep_in_fp32_modules"][0].split(" = ")[1]) == patterns
    assert lines["gradient_clipping"] == ["gradient_clipping = 0.0", "default", "DeepSpeed: 1.0"]
    assert set(lines) >= {"seed", "zero_optimization.stage", "backends.accelerator"}


def from_stdin(text, *words):
    command = [BIN / "scale", "config", "check", "-", *words]
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False, timeout=60)
    return done.returncode, done.stdout + done.stderr


def test_check_reads_stdin():
    assert from_stdin('\ufeff{"train_batch_size": 8}') == (0, "The configuration can be used.\n")
    assert from_stdin("nope.json") == (
        2,
        "Error: stdin, line 1, column 1: 'nope.json': it is not JSON: Expecting value. Comments and trailing commas "
        "are not part of JSON.\n",
    )
    assert "stdin: it is empty" in from_stdin("")[1]


@pytest.mark.parametrize(
    ("config", "keys"),
    [
        (
            {
                "train_batch_size": -1, "fp16": {"enabled": True}, "bf16": {"enabled": True}, "bogus": 1,
                "optimizer": {"type": "AdmW"}, "scheduler": {"type": "WarmupLRR"}, "autotuning": {"enabled": True},
                "backends": {"accelerator": "cdua", "io": "thread"}, "topology": {"dp_shard": 0},
                "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}},
            },
            ["bogus", "autotuning", "train_batch_size", "fp16.enabled", "scheduler.type", "topology.dp_shard",
             "zero_optimization.offload_optimizer", "backends.accelerator", "backends.io", "optimizer.type"],
        ),
        (
            {
                "gradient_clipping": float("nan"),
                "optimizer": {
                    "type": "AdamW", "params": {"lr": float("inf"), "lrr": 1, "max_grad_norm": 1.0},
                    "groups": [{"match": ["*"], "params": {"wd": 1, "fused": True, "eps": 1e-6}}],
                },
                "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 0, "warmup_tpe": "log"}},
            },
            ["gradient_clipping", "optimizer.params.max_grad_norm", "scheduler.params.warmup_tpe",
             "scheduler.params.warmup_num_steps", "optimizer.params.lr", "optimizer.params.lrr",
             "optimizer.groups[0].params.fused", "optimizer.groups[0].params.wd"],
        ),
        (
            {
                "train_micro_batch_size_per_gpu": "auto", "gradient_clipping": "auto",
                "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto"}},
                "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto", "warmup_max_lr": "auto"}},
                "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"},
                                      "offload_param": {"device": "cpu"}},
            },
            ["train_micro_batch_size_per_gpu", "gradient_clipping", "optimizer.params.lr", "optimizer.params.betas",
             "scheduler.params.total_num_steps", "scheduler.params.warmup_max_lr",
             "zero_optimization.offload_optimizer", "zero_optimization.offload_param"],
        ),
        (
            {"optimizer": {"type": 3}, "scheduler": {"type": "StepLR", "params": {"gamma": True}}},
            ["optimizer.type", "scheduler", "scheduler.params.gamma"],
        ),
        ({"optimizer": {"type": "SGD", "params": {"momentum": 0.9, "nesterov": True},
                        "groups": [{"match": ["*"], "params": {"momentum": 0.0}}]}}, ["optimizer.groups[0].params"]),
        ({"optimizer": {"type": "RMSprop", "groups": [{"match": ["*"], "params": {"lr": "fast", "alfa": 1}}]}},
         ["optimizer.groups[0].params.alfa", "optimizer.groups[0].params.lr"]),
        ({"scheduler": {"type": "WarmupLR"}}, ["scheduler.type"]),
    ],
    ids=["layers", "values", "autos", "unknown type", "together in a group", "torch", "scheduler alone"],
)  # fmt: skip
def test_check_tells_the_mistakes_of_all_layers_each_in_a_line_with_its_path(config, keys, capsys):
    code, _, err = told(capsys, "config", "check", json.dumps(config))
    assert code == 2
    lines = [line.removeprefix("Error: ").removeprefix("Unknown key ") for line in err.splitlines()]
    assert [re.split(r"[ :=]|\.(?= )", line)[0] for line in lines] == keys, err


def test_a_schedule_may_stand_alone_where_the_script_has_the_optimizer(capsys):
    text = '{"scheduler": {"type": "WarmupLR"}}'
    assert "--own-optimizer" in told(capsys, "config", "check", text)[2]
    assert told(capsys, "config", "check", "--own-optimizer", text) == (0, "The configuration can be used.\n", "")


def test_scale_report_is_scale_report(capsys):
    assert told(capsys, "report", "--list") == told(capsys, "--list", call=report_main)
