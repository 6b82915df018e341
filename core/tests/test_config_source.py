"""Reading: dicts, paths, JSON text; what cannot be read says where and why."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from polyscale.config import load_config
from polyscale.config.errors import SeveralConfigErrors, SourceError, WrongValueError
from polyscale.errors import ConfigError

ONE = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 2}, "optimizer": {"type": "SGD"}}


def test_a_dict_a_path_and_json_text_give_the_same_configuration(tmp_path: Path):
    file = tmp_path / "zero2.json"
    file.write_text(json.dumps(ONE))
    loaded = [load_config(source) for source in (ONE, file, str(file), json.dumps(ONE), "\n " + json.dumps(ONE))]
    assert {config.digest() for config in loaded} == {loaded[0].digest()}
    assert loaded[0].zero_optimization.stage == 2
    assert [config.origins["zero_optimization.stage"].kind for config in loaded] == [
        "argument", "file", "file", "argument", "argument",
    ]  # fmt: skip
    assert loaded[1].origins["zero_optimization.stage"].detail == str(file)


def test_a_config_is_returned_as_it_is_and_a_seed_wins():
    config = load_config({"seed": 3})
    assert load_config(config) is config
    assert load_config({"seed": 3}, seed=7).seed == 7
    again = load_config(config, seed=7)
    assert (again.seed, again.origins["seed"].kind, config.seed) == (7, "argument", 3)


def test_the_users_dict_is_neither_changed_nor_shared():
    mine = {"bfloat16": {"enabled": True}, "optimizer": {"type": "SGD", "params": {"lr": 1}}, "zero_optimization": True}
    before = json.dumps(mine)
    config = load_config(mine)
    mine["optimizer"]["params"]["lr"] = 2
    assert config.optimizer.params == {"lr": 1}
    mine["optimizer"]["params"]["lr"] = 1
    assert json.dumps(mine) == before


def test_a_byte_order_mark_is_no_part_of_the_configuration(tmp_path: Path):
    file = tmp_path / "windows.json"
    file.write_text(json.dumps(ONE), encoding="utf-8-sig")
    assert file.read_bytes().startswith(b"\xef\xbb\xbf")
    assert load_config(file).digest() == load_config("\ufeff" + json.dumps(ONE)).digest() == load_config(ONE).digest()


def test_keys_that_stand_twice_are_named_with_their_path():
    with pytest.raises(SourceError, match=r"Key zero_optimization\.stage: it stands twice"):
        load_config('{"zero_optimization": {"stage": 1, "stage": 2}}')
    with pytest.raises(SeveralConfigErrors) as error:
        load_config('{"optimizer": {"type": "SGD", "groups": [{"match": ["a"]}, {"match": ["b"], "match": []}]}, '
                    '"seed": 1, "seed": 2}')  # fmt: skip
    assert {one.given for one in error.value.errors} == {"Key seed", "Key optimizer.groups[1].match"}


def test_both_names_of_a_key_are_an_error():
    with pytest.raises(WrongValueError, match="bfloat16 and bf16"):
        load_config({"bfloat16": {"enabled": True}, "bf16": {"enabled": True}})


def test_what_cannot_be_read_says_so(tmp_path: Path):
    with pytest.raises(SourceError, match=r"'nope\.json': no such file"):
        load_config("nope.json")
    with pytest.raises(SourceError, match=r"the JSON text, line 2, column 8: '\"b\": 1,,'"):
        load_config('{"a": 1,\n"b": 1,,\n}')
    with pytest.raises(SourceError, match="cannot be read"):
        load_config(tmp_path)
    (tmp_path / "list.json").write_text("[1]")
    with pytest.raises(SourceError, match="holds a list"):
        load_config(tmp_path / "list.json")
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe{")
    with pytest.raises(SourceError, match="cannot be read"):
        load_config(tmp_path / "binary.json")
    for source in ("", "  ", "x\0y", "a" * 5000):
        with pytest.raises(SourceError):
            load_config(source)
    for source in (3, None, ["a"], {3: 4}):
        with pytest.raises(ConfigError):
            load_config(source)
    with pytest.raises(SourceError, match="nested too deeply"):
        load_config('{"a":' * 100_000)


def test_environment_wins_over_the_file_and_is_the_origin(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("POLYSCALE_ACCELERATOR", "cpu")
    config = load_config({"backends": {"accelerator": "elsewhere"}})
    assert config.backends.accelerator == "cpu"
    assert (config.origins["backends.accelerator"].kind, config.origins["backends.accelerator"].detail) == (
        "environment", "POLYSCALE_ACCELERATOR",
    )  # fmt: skip


def test_reading_a_configuration_imports_no_torch_and_prints_nothing():
    script = (
        "import sys; from polyscale.config import load_config; from polyscale.config.explain import explain;"
        "from polyscale.config.check import check; from polyscale.config.init import init;"
        "config = load_config(init(3)); explain(config); check(init(3)); config.batch(2);"
        "assert 'torch' not in sys.modules and 'stevedore' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
