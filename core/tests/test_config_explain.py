"""``explain``, ``check`` and ``init``: what the command line shows; and the JSON of the documentation."""

import json
import re
from pathlib import Path

import pytest

from polyscale.config import load_config
from polyscale.config.check import check
from polyscale.config.errors import NotBuiltError, WrongValueError
from polyscale.config.explain import explain
from polyscale.config.init import init


def rows(source, **arguments):
    return {row.path: row for row in explain(load_config(source, **arguments))}


def test_every_value_is_explained_with_its_origin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("POLYSCALE_ACCELERATOR", "cpu")
    file = tmp_path / "ds_config.json"
    file.write_text(
        json.dumps(
            {
                "train_batch_size": 16,
                "gradient_accumulation_steps": "auto",
                "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
                "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "auto"}},
                "zero_optimization": {"stage": 2, "overlap_comm": True},
                "flops_profiler": {"enabled": False},
            }
        )
    )
    found = rows(file, seed=5)
    assert {path: str(found[path].origin) for path in (
        "train_batch_size", "gradient_accumulation_steps", "optimizer.params.lr", "scheduler.params.warmup_max_lr",
        "zero_optimization.stage", "seed", "backends.accelerator", "gradient_clipping", "flops_profiler.enabled",
    )} == {
        "train_batch_size": f"file ({file})",
        "gradient_accumulation_steps": "auto (by arithmetic from the other batch numbers and the data-parallel ranks)",
        "optimizer.params.lr": f"file ({file})",
        "scheduler.params.warmup_max_lr": "auto (optimizer.params.lr)",
        "zero_optimization.stage": f"file ({file})",
        "seed": "argument (seed=)",
        "backends.accelerator": "environment (POLYSCALE_ACCELERATOR)",
        "gradient_clipping": "default",
        "flops_profiler.enabled": f"file ({file})",
    }  # fmt: skip
    assert found["zero_optimization.overlap_comm"].status == "no effect here"
    assert found["zero_optimization.offload_param"].status == "needs a plugin that honours it"
    assert found["flops_profiler.enabled"].status == "not built yet"
    assert all(row.note for row in found.values() if "params" not in row.path)


def test_what_differs_from_deepspeeds_default_is_marked():
    found = rows({})
    assert [path for path, row in found.items() if row.differs] == ["gradient_clipping"]
    assert (found["gradient_clipping"].value, found["gradient_clipping"].deepspeed_default) == (0.0, 1.0)
    assert (found["topology.dp_shard"].deepspeed_default, found["topology.dp_shard"].differs) == ("-", False)
    assert not rows({"gradient_clipping": 1.0})["gradient_clipping"].differs
    assert rows({"fp16": {"hysteresis": 3}})["fp16.hysteresis"].differs


def test_check_lists_all_errors_and_then_notes():
    problems = check(
        {"zero_optimization": {"stage": 5, "bogus": 1}, "fp16": {"enabled": 3}, "autotuning": {"enabled": True}}
    )
    assert [(one.kind, one.key) for one in problems] == [
        ("error", "zero_optimization.bogus"), ("error", "autotuning"), ("error", "fp16.enabled"),
        ("error", "zero_optimization.stage"),
    ]  # fmt: skip
    assert isinstance(problems[1].error, NotBuiltError)
    offload = {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}, "overlap_comm": True}}
    assert [(one.kind, one.key) for one in check(offload)] == [
        ("error", "zero_optimization.offload_param"), ("note", "zero_optimization.overlap_comm"),
    ]  # fmt: skip
    honoured = frozenset({"zero_optimization.offload_param", "zero_optimization.overlap_comm"})
    assert check(offload, honoured=honoured) == []
    assert [one.kind for one in check({"train_batch_size": 3}, dp_world=2)] == ["error"]
    assert [one.kind for one in check("nope.json")] == ["error"]


@pytest.mark.parametrize("stage", range(4))
def test_init_gives_a_configuration_without_problems(stage: int):
    config = init(stage)
    assert load_config(json.dumps(config)).zero_optimization.stage == stage
    assert check(config) == []


def test_init_of_a_stage_that_does_not_exist_is_refused():
    for stage in (4, -1, True, "2"):
        with pytest.raises(WrongValueError, match="expected 0, 1, 2 or 3"):
            init(stage)


MANUAL = Path(__file__).parents[2] / "docs" / "configuration.md"


def test_every_json_block_of_the_manual_is_a_valid_configuration():
    blocks = re.findall(r"```json\n(.*?)```", MANUAL.read_text(), flags=re.DOTALL)
    assert len(blocks) >= 4
    for block in blocks:
        assert [one.text for one in check(block, dp_world=4) if one.kind == "error"] == []


def test_every_key_that_the_manual_names_in_its_tables_is_known():
    tables = re.findall(r"^\| key \| meaning \|\n((?:\|.*\n)+)", MANUAL.read_text(), flags=re.MULTILINE)
    named = [key for table in tables for key in re.findall(r"^\| `([\w.]+)`", table, flags=re.MULTILINE)]
    assert len(named) > 30
    known = set(rows({"optimizer": {"type": "SGD"}, "scheduler": {"type": "WarmupLR"}}))
    sections = {path.rpartition(".")[0] for path in known}
    assert [key for key in named if key not in known | sections] == []
