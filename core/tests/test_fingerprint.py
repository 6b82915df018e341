"""Fingerprints: equal for equal models, and the first difference named with both values."""

import sys

import pytest
import torch
from torch import nn

from polyscale import PolyscaleError, partitioned_init
from polyscale.parameters.fingerprint import Fingerprint, fingerprint, first_difference


def test_values_do_not_matter_and_json_keeps_everything():
    a, b = (fingerprint(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))) for _ in range(2))
    assert a == b and a.digest == b.digest and first_difference(a, b) is None
    again = Fingerprint.from_json(a.to_json())
    assert again == a and again.digest == a.digest


def _frozen():
    layer = nn.Linear(3, 4)
    layer.bias.requires_grad_(False)
    return layer


def _tied():
    pair = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    pair[1].weight = pair[0].weight
    return pair


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        (nn.Linear(3, 4), nn.Linear(3, 5), ["weight", "[4, 3]", "[5, 3]"]),
        (nn.Linear(3, 4), nn.Linear(3, 4, dtype=torch.float64), ["weight", "float32", "float64"]),
        (nn.Linear(3, 4), nn.Linear(3, 4, bias=False), ["parameter 1", "bias", "absent"]),
        (nn.Linear(3, 4), _frozen(), ["bias", "trained", "not trained"]),
        (_tied(), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), ["1.weight", "tied to 0.weight"]),
        (nn.BatchNorm1d(4), nn.BatchNorm1d(4, track_running_stats=False), ["buffer 0", "running_mean", "absent"]),
        (nn.ModuleDict({"a": nn.Linear(2, 2)}), nn.ModuleDict({"b": nn.Linear(2, 2)}), ["a.weight", "b.weight"]),
        (nn.Linear(3, 4), nn.Linear(3, 4, device="meta"), ["start", "real", "meta"]),
    ],
)
def test_the_first_difference_is_named(first, second, words):
    a, b = fingerprint(first), fingerprint(second)
    assert a.digest != b.digest
    text = first_difference(a, b)
    assert text is not None and all(word in text for word in words)


def test_a_partitioned_start_differs_from_a_real_one_in_its_start_only():
    with partitioned_init():
        deferred = fingerprint(nn.Linear(64, 64))
    real = fingerprint(nn.Linear(64, 64))
    assert deferred.parameters == real.parameters
    assert first_difference(deferred, real) == "the model's start: deferred against real"


def calls_of_a_fingerprint(layers):
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(1, 1) for _ in range(layers)))
    calls = 0

    def count(frame, event, argument):
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        fingerprint(model)
    finally:
        sys.setprofile(None)
    return calls


def test_the_work_grows_with_the_number_of_parameters_and_no_faster():
    calls_of_a_fingerprint(1)  # what is imported or kept at the first use
    few, many = calls_of_a_fingerprint(100), calls_of_a_fingerprint(400)
    assert few < many < 4.1 * few
    assert many < 100 * 800  # a parameter costs some calls, not a pass over the others


@pytest.mark.parametrize("text", ["", "{}", '{"parameters": 3, "buffers": [], "start": "real"}', "[1]"])
def test_a_broken_text_is_an_error(text):
    with pytest.raises(PolyscaleError, match="fingerprint"):
        Fingerprint.from_json(text)
