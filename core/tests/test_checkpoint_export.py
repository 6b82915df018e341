import json
import os
import weakref

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from polyscale.checkpoint.export import export_safetensors
from polyscale.errors import CheckpointError

FLOATS = ["float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "complex64"]
INTEGERS = ["int64", "int32", "int16", "int8", "uint8", "uint16", "uint32", "uint64", "bool"]
DTYPES = FLOATS + INTEGERS


class PlainIO:
    """Positional writes, as the io plugins make them; fails at the ``fail_at``-th."""

    name = "plain"

    def __init__(self, fail_at=None):
        self.writes = 0
        self.fail_at = fail_at

    def write(self, tensor, path, offset=0):
        assert tensor.is_contiguous() and tensor.device.type == "cpu"
        if self.writes == self.fail_at:
            raise OSError(28, "No space left on device", str(path))
        self.writes += 1
        data = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)
        try:
            return os.pwrite(descriptor, data, offset)
        finally:
            os.close(descriptor)


def names(root):
    return sorted(path.name for path in root.iterdir())


def plan_of(tensors):
    return [(name, tensor.shape, tensor.dtype) for name, tensor in tensors.items()]


def same(left, right):
    return (
        left.dtype == right.dtype
        and left.shape == right.shape
        and left.reshape(-1).contiguous().view(torch.uint8).equal(right.reshape(-1).contiguous().view(torch.uint8))
    )


def zoo():
    torch.manual_seed(0)
    tensors = {"z.bool": torch.tensor([True, False, True])}
    for name in DTYPES:
        tensors[f"t.{name}"] = (torch.randn(3, 5) * 50).abs().to(getattr(torch, name))
    tensors |= {"scalar": torch.tensor(2.5), "empty": torch.empty(0, 4), "turned": torch.randn(4, 6).t()}
    tensors |= {'ü"name': torch.ones(1), "tied": tensors["turned"]}
    return tensors


def test_the_safetensors_library_reads_back_every_key_dtype_and_value(tmp_path):
    tensors = zoo()
    arriving = reversed(tensors.items())  # in any order
    assert export_safetensors(arriving, plan_of(tensors), tmp_path / "out", PlainIO()) == [
        tmp_path / "out" / "model.safetensors"
    ]
    assert names(tmp_path / "out") == ["model.safetensors"]
    read = load_file(tmp_path / "out" / "model.safetensors")
    assert set(read) == set(tensors)
    assert all(same(read[name], tensors[name]) for name in tensors)
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    header = int.from_bytes((tmp_path / "out" / "model.safetensors").read_bytes()[:8], "little")
    assert header % 8 == 0


def test_an_empty_plan_and_a_named_file_with_own_metadata(tmp_path):
    export_safetensors(iter(()), [], tmp_path / "x.safetensors", PlainIO(), metadata={"a": "ü"})
    with safe_open(tmp_path / "x.safetensors", "pt") as file:
        assert list(file.keys()) == [] and file.metadata() == {"a": "ü"}


def test_larger_weights_are_cut_into_numbered_files_with_an_index(tmp_path):
    tensors = {f"w{i}": torch.full((10,), float(i)) for i in range(7)} | {"big": torch.arange(100.0)}
    export_safetensors(iter(tensors.items()), plan_of(tensors), tmp_path, PlainIO(), max_shard_bytes=120)
    files = [f"model-0000{i}-of-00004.safetensors" for i in (1, 2, 3)] + ["model-00004-of-00004.safetensors"]
    # 3 x 40 bytes fit in 120: w0-w2, w3-w5, w6, big
    assert names(tmp_path) == [*files, "model.safetensors.index.json"]
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 7 * 40 + 400
    assert set(index["weight_map"]) == set(tensors)
    for name, file in index["weight_map"].items():
        assert same(load_file(tmp_path / file)[name], tensors[name])


def test_a_second_export_replaces_the_files_of_the_first(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    small, large = {"a": torch.ones(4)}, {"a": torch.zeros(4), "b": torch.zeros(4)}

    def export(tensors, limit):
        export_safetensors(iter(tensors.items()), plan_of(tensors), tmp_path, PlainIO(), max_shard_bytes=limit)
        return names(tmp_path)

    single = ["config.json", "model.safetensors"]
    numbered = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    assert export(small, 100) == single
    assert export(large, 16) == ["config.json", *numbered, "model.safetensors.index.json"]
    assert export(small, 100) == single
    assert same(load_file(tmp_path / "model.safetensors")["a"], small["a"])


def test_one_tensor_is_in_memory_at_a_time(tmp_path):
    alive: list[weakref.ref] = []
    most = 0

    def gathering():
        nonlocal most
        for i in range(6):
            tensor = torch.full((100,), float(i))
            alive.append(weakref.ref(tensor))
            yield f"w{i}", tensor
            del tensor
            most = max(most, sum(reference() is not None for reference in alive))

    plan = [(f"w{i}", (100,), torch.float32) for i in range(6)]
    export_safetensors(gathering(), plan, tmp_path, PlainIO(), max_shard_bytes=1000)
    assert most == 0


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ([("a", torch.ones(2)), ("b", torch.ones(2)), ("c", torch.ones(1))], "'c'.*the plan does not have it"),
        ([("a", torch.ones(2)), ("a", torch.ones(2)), ("b", torch.ones(2))], "'a'.*came twice"),
        ([("a", torch.ones(2))], "1 tensors of the plan did not come. b"),
        ([("a", torch.ones(2, 1)), ("b", torch.ones(2))], r"\[2, 1\].*the plan says \[2\]"),
        ([("a", torch.ones(2).half()), ("b", torch.ones(2))], "float16.*the plan says.*float32"),
    ],
)
def test_a_mismatch_of_plan_and_tensors_leaves_no_file_and_runs_the_iterator_to_its_end(tmp_path, tensors, said):
    plan = [("a", (2,), torch.float32), ("b", (2,), torch.float32)]
    arriving = iter(tensors)
    with pytest.raises(CheckpointError, match=said):
        export_safetensors(arriving, plan, tmp_path, PlainIO())
    assert next(arriving, None) is None
    assert names(tmp_path) == []


@pytest.mark.parametrize("fail_at", [0, 1, 2, 5])
def test_a_full_disk_leaves_the_earlier_export_and_runs_the_iterator_to_its_end(tmp_path, fail_at):
    old, new = {"a": torch.ones(2)}, {name: torch.zeros(2) for name in "abcd"}
    export_safetensors(iter(old.items()), plan_of(old), tmp_path, PlainIO())
    arriving = iter(new.items())
    with pytest.raises(CheckpointError, match="No space left on device"):
        export_safetensors(arriving, plan_of(new), tmp_path, PlainIO(fail_at), max_shard_bytes=16)
    assert next(arriving, None) is None
    assert names(tmp_path) == ["model.safetensors"]
    assert same(load_file(tmp_path / "model.safetensors")["a"], old["a"])


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        ([("a", (2,), torch.float32), ("a", (2,), torch.float32)], "in the plan twice"),
        ([("a", (2,), torch.complex128)], "complex128.*safetensors lacks it"),
        ([("__metadata__", (2,), torch.float32)], "cannot hold it"),
    ],
)
def test_a_plan_that_the_format_cannot_hold_is_refused(tmp_path, plan, said):
    arriving = iter([("a", torch.ones(2))])
    with pytest.raises(CheckpointError, match=said):
        export_safetensors(arriving, plan, tmp_path, PlainIO())
    assert next(arriving, None) is None
    assert names(tmp_path) == []


def test_an_error_of_the_iterator_passes_through_and_leaves_no_file(tmp_path):
    def gathering():
        yield "a", torch.ones(2)
        raise RuntimeError("rank 1 died")

    with pytest.raises(RuntimeError, match="rank 1 died"):
        export_safetensors(gathering(), [("a", (2,), torch.float32)], tmp_path, PlainIO())
    assert names(tmp_path) == []


@pytest.mark.parametrize("limit", [1 << 30, 4000])
def test_transformers_loads_what_was_exported(tmp_path, limit):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=32, n_positions=16)
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config)
    values = model.state_dict()  # with both names of the tied weight
    assert "lm_head.weight" in values and "transformer.wte.weight" in values
    config.save_pretrained(tmp_path)
    export_safetensors(iter(values.items()), plan_of(values), tmp_path, PlainIO(), max_shard_bytes=limit)
    loaded = transformers.GPT2LMHeadModel.from_pretrained(tmp_path)
    assert all(same(loaded.state_dict()[name], value) for name, value in values.items())
    ids = torch.arange(8)[None]
    assert torch.equal(model.eval()(ids).logits, loaded.eval()(ids).logits)
