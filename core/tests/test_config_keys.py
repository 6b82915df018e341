"""Every key of DeepSpeed's configuration is known, with a status; every other key is an error, at any depth."""

import json
from pathlib import Path

import pytest

from polyscale.config import load_config
from polyscale.config.errors import NotBuiltError, UnknownKeyError
from polyscale.errors import ConfigError, PluginError

# Transcribed from DeepSpeed's own documentation and code, not from ours: section -> keys with their defaults.
DEEPSPEED = json.loads((Path(__file__).parent / "test_config_deepspeed_keys.json").read_text())


def defaults(table):
    return {key: defaults(value) if isinstance(value, dict) else value for key, value in table.items()}


@pytest.mark.parametrize("name", sorted(DEEPSPEED))
def test_every_key_of_deepspeed_is_known_and_its_default_is_accepted(name: str):
    value = DEEPSPEED[name]
    if not isinstance(value, dict):
        load_config({name: value})
        return
    if name in ("sparse_attention", "weight_quantization"):  # these ask for their feature by being there
        with pytest.raises(NotBuiltError, match=name):
            load_config({name: value})
        value = {**value, "enabled": False} if name == "weight_quantization" else value
        if name == "sparse_attention":
            return
    load_config({name: defaults(value)})


SECTIONS = sorted(name for name in DEEPSPEED if isinstance(DEEPSPEED[name], dict) and name not in ("amp", "bfloat16"))


@pytest.mark.parametrize("name", SECTIONS)
def test_a_typo_in_any_section_is_found(name: str):
    def typos(table, prefix):
        for key, value in table.items():
            if isinstance(value, dict) and value:
                yield from typos(value, [*prefix, key])
        yield [*prefix, "nosuchkey"]

    for path in typos(DEEPSPEED[name], [name]):
        if path[-2] in ("schedule_config", "curriculum_metrics", "different_groups"):
            continue  # names are free there
        nested: dict = {}
        inner = nested
        for part in path[:-1]:
            inner = inner.setdefault(part, {})
        inner[path[-1]] = 1
        if name == "weight_quantization":
            nested[name]["enabled"] = False
        with pytest.raises(ConfigError) as error:
            load_config(nested)
        found = getattr(error.value, "errors", [error.value])  # a required key may be missing too
        unknown = [one.given for one in found if isinstance(one, UnknownKeyError)]
        assert unknown == ["Unknown key " + ".".join(path)]


@pytest.mark.parametrize(
    ("config", "path", "hint"),
    [
        ({"zero_optimisation": {}}, "zero_optimisation", "'zero_optimization'"),
        ({"zero_optimization": {"stge": 2}}, "zero_optimization.stge", "'stage'"),
        ({"stage": 2}, "stage", "zero_optimization.stage"),
        ({"backends": {"acelerator": "cpu"}}, "backends.acelerator", "'accelerator'"),
        ({"optimizer": {"type": "SGD", "groups": [{"match": ["a"]}, {"match": ["a"], "parms": {}}]}},
         "optimizer.groups[1].parms", "'params'"),
        ({"zero_optimization": {"offload_param": {"device": "none", "pin_memry": True}}},
         "zero_optimization.offload_param.pin_memry", "'pin_memory'"),
        ({"tensor_parallel": {"partition_config": {"layer_specs": [{"pattern": []}]}}},
         "tensor_parallel.partition_config.layer_specs[0].pattern", "'patterns'"),
        ({"compression_training": {"row_pruning": {"different_groups": {"any": {"module": ["*"]}}}}},
         "compression_training.row_pruning.different_groups.any.module", "'modules'"),
    ],
)  # fmt: skip
def test_an_unknown_key_is_named_with_its_path_and_the_nearest(config, path, hint):
    with pytest.raises(UnknownKeyError) as error:
        load_config(config)
    assert error.value.given == f"Unknown key {path}"
    assert f"Did you mean {hint}?" in str(error.value)


def test_older_names_and_short_forms_mean_the_same():
    assert load_config({"bfloat16": {"enabled": True}}).bf16.enabled
    assert load_config({"zero_optimization": True}).zero_optimization.stage == 1
    assert load_config({"zero_optimization": False}).zero_optimization.stage == 0
    zero = load_config(
        {"zero_optimization": {"prefetch_bucket_size": 7, "stage3_gather_fp16_weights_on_model_save": True}}
    )
    assert zero.zero_optimization.stage3_prefetch_bucket_size == 7
    assert zero.zero_optimization.stage3_gather_16bit_weights_on_model_save
    assert zero.origins["zero_optimization.stage3_prefetch_bucket_size"].kind == "argument"


def install(folder: Path, name: str, body: str, key: str) -> None:
    """Lay out a distribution as pip would."""
    (folder / f"{name}.py").write_text(body)
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[polyscale.config]\n{key} = {name}:Section\n")


MODEL = """
from pydantic import BaseModel
class Inner(BaseModel):
    depth: int = 1
class Section(BaseModel):
    enabled: bool = False
    rate: float = 0.5
    inner: Inner = Inner()
"""


def test_a_plugins_section_is_checked_and_loaded_only_when_it_is_set(tmp_path, monkeypatch):
    install(tmp_path, "polyscale_fake_section", MODEL + "print('loaded')\n", "fake_section")
    monkeypatch.syspath_prepend(str(tmp_path))
    import sys

    with pytest.raises(UnknownKeyError, match="Did you mean 'fake_section'"):
        load_config({"fake_sectoin": {}})
    assert "polyscale_fake_section" not in sys.modules
    config = load_config({"fake_section": {"rate": 0.25, "inner": {"depth": 3}}})
    assert (config.section("fake_section").rate, config.section("fake_section").inner.depth) == (0.25, 3)
    assert config.as_dict()["fake_section"] == {"enabled": False, "rate": 0.25, "inner": {"depth": 3}}
    assert config.origins["fake_section.rate"].kind == "argument"
    assert config.origins["fake_section.enabled"].kind == "default"
    assert load_config({}).section("fake_section") is None
    with pytest.raises(UnknownKeyError, match=r"fake_section\.inner\.dept\. Did you mean 'depth'"):
        load_config({"fake_section": {"inner": {"dept": 3}}})
    with pytest.raises(Exception, match=r"fake_section\.rate = 'x'\: expected"):
        load_config({"fake_section": {"rate": "x"}})


def test_a_plugins_section_replaces_the_table_of_what_is_not_built(tmp_path, monkeypatch):
    with pytest.raises(NotBuiltError):
        load_config({"nebula": {"enabled": True}})
    install(tmp_path, "polyscale_fake_nebula", MODEL, "nebula")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert load_config({"nebula": {"enabled": True}}).section("nebula").enabled


def test_a_plugins_section_that_fails_to_load_is_named(tmp_path, monkeypatch, capsys):
    install(tmp_path, "polyscale_broken_section", "print('noise'); raise SystemExit(3)", "broken_section")
    (tmp_path / "other").mkdir()
    install(tmp_path / "other", "polyscale_second_section", MODEL, "twice_section")
    install(tmp_path, "polyscale_first_section", MODEL, "twice_section")
    monkeypatch.syspath_prepend(str(tmp_path / "other"))
    monkeypatch.syspath_prepend(str(tmp_path))
    load_config({})
    with pytest.raises(PluginError, match=r"(?s)broken_section.*polyscale_broken_section.*exit"):
        load_config({"broken_section": {}})
    with pytest.raises(PluginError, match="twice_section") as error:
        load_config({"twice_section": {}})
    assert "polyscale_first_section" in str(error.value) and "polyscale_second_section" in str(error.value)
    assert capsys.readouterr().out == ""
