import os
import pickle
import random
from collections import Counter, OrderedDict, defaultdict, namedtuple
from pathlib import Path

import numpy
import pytest
import torch

from polyscale.checkpoint.blobs import check_blob, load_blob, save_blob
from polyscale.errors import CheckpointError

Point = namedtuple("Point", "x y")


def test_what_may_be_saved_reads_back(tmp_path):
    value = {
        "state": [torch.arange(3), torch.tensor(1.5, dtype=torch.bfloat16), torch.nn.Parameter(torch.ones(2))],
        "rng": random.getstate(),
        "torch_rng": torch.get_rng_state(),
        1: (True, None, 2**70, 1.5, 1 + 2j, "x", b"y", bytearray(b"z"), {1, 2}),
        "more": OrderedDict(a=Counter("aab")),
        "torch": [torch.float16, torch.Size([2]), torch.device("cpu")],
    }
    save_blob(tmp_path / "x.pt", value)
    back = load_blob(tmp_path / "x.pt")
    assert all(map(torch.equal, back.pop("state"), value.pop("state")))
    assert torch.equal(back.pop("torch_rng"), value.pop("torch_rng"))
    assert back == value


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (numpy.float64(1.0), r"\['a'\]\[0\] is a numpy\.float64.*\.item\(\)"),
        (numpy.ones(2), r"numpy\.ndarray.*from_numpy"),
        (Path("x"), "PosixPath"),
        (Point(1, 2), "Point"),
        (defaultdict(int), "defaultdict"),
        (frozenset([1]), "frozenset"),
        (range(3), "range"),
        (print, "builtin_function_or_method"),
        (torch.nn.Linear(1, 1), r"Linear.*state_dict\(\)"),
        (random.Random(0), r"random\.Random"),
        (torch.ones(1, device="meta"), "meta"),
    ],
)
def test_what_could_not_be_loaded_again_is_refused_before_anything_is_written(tmp_path, value, said):
    with pytest.raises(CheckpointError, match=said):
        save_blob(tmp_path / "client_state.pt", {"a": [value]})
    with pytest.raises(CheckpointError, match="client_state"):
        check_blob({value} if isinstance(value, frozenset) else [value])
    assert list(tmp_path.iterdir()) == []


def test_a_value_that_holds_itself_is_refused():
    value: list = []
    value.append(value)
    with pytest.raises(CheckpointError, match="holds itself"):
        check_blob(value)
    shared = [1]
    check_blob([shared, shared])


class Evil:
    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_a_malicious_file_executes_nothing(tmp_path):
    evil = Evil()
    evil.path = tmp_path / "ran"
    torch.save({"a": evil}, tmp_path / "x.pt")
    (tmp_path / "y.pt").write_bytes(pickle.dumps(evil))
    for name in ("x.pt", "y.pt"):
        with pytest.raises(CheckpointError, match="cannot be read"):
            load_blob(tmp_path / name)
    assert not evil.path.exists()


def test_missing_and_damaged_files_are_errors(tmp_path):
    path = tmp_path / "x.pt"
    with pytest.raises(CheckpointError, match="No such file"):
        load_blob(path)
    save_blob(path, {"a": torch.ones(1000)})
    data = path.read_bytes()
    for length in (0, 1, 100, len(data) // 2, len(data) - 30):
        path.write_bytes(data[:length])
        with pytest.raises(CheckpointError, match=r"the file is damaged.*\. Load another checkpoint"):
            load_blob(path)
