import json
from collections import Counter
from dataclasses import dataclass, replace

import pytest

from polyscale import __version__
from polyscale.checkpoint.compare import compare_parameters
from polyscale.checkpoint.manifest import Manifest, ParameterEntry, parameter_entries, read_manifest, write_manifest
from polyscale.checkpoint.report import LoadReport
from polyscale.errors import CheckpointError

FULL = Manifest(
    world_size=2,
    stage=3,
    data_parallel="fsdp2",
    tensors=("w", "optimizer/w/exp_avg"),
    parameters={"w": ParameterEntry((2, 3), "float32", ("head.w",)), "s": ParameterEntry((), "bfloat16")},
    optimizer={
        "class": "AdamW",
        "groups": [{"names": ["w"], "options": {"betas": (0.9, 0.999), "lr": 1e-3, "fused": None}}],
        "states": {"w": {"tensors": {"exp_avg": "float32"}, "scalars": {"step": {"tensor": 3.0, "dtype": "float32"}}}},
    },
    scheduler={"milestones": Counter({30: 1, 80: 2}), 3: [float("inf"), 0.1], "__tuple__": [1]},
    scaler={"__tuple__": [1]},
    classes={"scheduler": "StepLR"},
    counters={"steps": 10**18},
    has={"rng": True, "client_state": False},
)


def test_a_manifest_reads_back_exactly_and_is_strict_json(tmp_path):
    write_manifest(tmp_path, FULL)
    assert read_manifest(tmp_path) == FULL
    assert type(read_manifest(tmp_path).scheduler["milestones"]) is Counter

    def no_constant(name):
        raise AssertionError(name)

    content = json.loads((tmp_path / "manifest.json").read_text(), parse_constant=no_constant)
    assert content["format"] == 1 and content["polyscale"] == __version__
    assert content["parameters"]["w"] == {"shape": [2, 3], "dtype": "float32", "tied_to": ["head.w"]}


def test_numbers_of_tensors_are_taken_and_other_values_refused_with_their_place(tmp_path):
    import numpy
    import torch

    write_manifest(tmp_path, replace(FULL, scheduler={"lr": torch.tensor(0.5), "k": numpy.float64(0.1)}))
    assert read_manifest(tmp_path).scheduler == {"lr": 0.5, "k": 0.1}
    (tmp_path / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"manifest\.scheduler\['f'\]\[1\] is a builtins\.object"):
        write_manifest(tmp_path, replace(FULL, scheduler={"f": [1, object()]}))
    assert list(tmp_path.iterdir()) == []


def test_a_newer_format_says_which_version_reads_it(tmp_path):
    write_manifest(tmp_path, replace(FULL, format=7, polyscale="3.1.0"))
    with pytest.raises(CheckpointError, match=r"format 7.*polyscale 3\.1\.0.*pip install 'polyscale-core>=3\.1\.0'"):
        read_manifest(tmp_path)


def test_keys_of_a_later_version_of_the_same_format_are_passed_over(tmp_path):
    write_manifest(tmp_path, FULL)
    path = tmp_path / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "future": {"x": 1}}))
    assert read_manifest(tmp_path) == FULL


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "no JSON"),
        ('{"format": 1, "polysc', "no JSON"),
        ("\xff", "no JSON"),
        ("[" * 100_000, "no JSON"),
        ("[]", "no format"),
        ("{}", "no format"),
        ('{"format": "1"}', "no format"),
        ('{"format": 1}', "'world_size' is missing"),
        ('{"format": 1, "world_size": "2", "stage": 0, "data_parallel": "x", "tensors": []}', "'world_size' is '2'"),
    ],
)
def test_a_damaged_manifest_is_an_error(tmp_path, text, why):
    (tmp_path / "manifest.json").write_bytes(text.encode("latin1"))
    with pytest.raises(CheckpointError, match=why):
        read_manifest(tmp_path)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"optimizer": {"class": "AdamW", "states": {}}}, "'groups' is missing"),
        ({"optimizer": {"class": "AdamW", "groups": [{"names": "w", "options": {}}], "states": {}}}, "'names' is 'w'"),
        ({"optimizer": {"class": "AdamW", "groups": [], "states": {"w": {"tensors": {}}}}}, "'scalars' is missing"),
        ({"counters": {"steps": "3"}}, "'steps' is '3'"),
        ({"has": None}, "'has' is None"),
    ],
)
def test_a_manifest_with_parts_of_another_kind_is_an_error(tmp_path, change, why):
    write_manifest(tmp_path, FULL)
    path = tmp_path / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(CheckpointError, match=why):
        read_manifest(tmp_path)


def test_a_missing_manifest_is_an_error(tmp_path):
    with pytest.raises(CheckpointError, match="No such file"):
        read_manifest(tmp_path)


@dataclass(frozen=True)
class Info:
    fqn: str
    shape: tuple
    dtype: str = "torch.float32"
    tied_to: tuple = ()

    @property
    def names(self):
        return (self.fqn, *self.tied_to)


def manifest_of(*infos):
    return Manifest(1, 0, "ddp", parameters=parameter_entries(infos))


def test_the_same_model_compares_equal_whatever_its_dtypes_and_the_order_of_its_tied_names():
    saved = manifest_of(Info("wte", (8, 4), tied_to=("head",)), Info("b", ()))
    assert saved.parameters["wte"] == ParameterEntry((8, 4), "float32", ("head",))
    assert compare_parameters(saved, {"wte": Info("wte", (8, 4), "torch.bfloat16", ("head",)), "b": Info("b", ())}) == {
        "wte": "wte",
        "b": "b",
    }
    assert compare_parameters(saved, [Info("head", (8, 4), tied_to=("wte",)), Info("b", ())])["head"] == "wte"
    untied = compare_parameters(saved, [Info("head", (8, 4)), Info("wte", (8, 4)), Info("b", ())])
    assert untied == {"head": "wte", "wte": "wte", "b": "b"}


def test_another_model_is_refused_with_the_names_that_differ():
    saved = manifest_of(Info("a", (2,)), Info("c", (3,)), *(Info(f"old{i}", (1,)) for i in range(12)))
    model = [Info("a", (2,)), Info("b", (2,)), Info("c", (3, 1))]
    with pytest.raises(CheckpointError) as caught:
        compare_parameters(saved, model)
    message = str(caught.value)
    assert "1 missing: b;" in message
    assert "12 unexpected: old0, " in message and "old9, ..." in message and "old10" not in message
    assert "1 of another shape: c [3] instead of [3, 1]" in message


def test_a_model_that_ties_what_was_apart_is_refused():
    saved = manifest_of(Info("wte", (8, 4)), Info("head", (8, 4)))
    with pytest.raises(CheckpointError, match=r"1 tied here but apart there: wte \(wte, head\)"):
        compare_parameters(saved, [Info("wte", (8, 4), tied_to=("head",))])


def test_a_load_report_reads_as_a_sentence():
    report = LoadReport(("parameters", "optimizer"), ("rng",), (), tag="step10", step=10)
    assert str(report) == (
        "Loaded 'step10' at step 10. restored: parameters, optimizer; absent, left as they were: rng."
    )
    assert "and 4 more" in str(LoadReport(tuple("abcdefghij")))
