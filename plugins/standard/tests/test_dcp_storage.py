import io
import os
import pickle
import subprocess
import sys
import warnings
from contextlib import contextmanager

import pytest
import torch
import torch.distributed.checkpoint as dcp

from polyscale.errors import CheckpointError
from polyscale.interfaces.checkpoint import Box, CheckpointStorage, LogicalTensor, StoredTensor
from polyscale_standard.checkpoint import DcpPlugin, DcpStorage

STORAGE = DcpStorage()
REAL = (
    "float64",
    "float32",
    "float16",
    "bfloat16",
    "float8_e4m3fn",
    "int64",
    "int32",
    "int16",
    "int8",
    "uint8",
    "bool",
)
DTYPES = (*REAL, "complex64")


def whole(tensor):
    return LogicalTensor(tuple(tensor.shape), tensor.dtype, (Box((0,) * tensor.ndim, tensor),))


def wholes(tensors):
    return {name: whole(tensor) for name, tensor in tensors.items()}


def zoo():
    torch.manual_seed(0)
    tensors = {f"t.{name}": (torch.randn(3, 5) * 9).to(getattr(torch, name)) for name in DTYPES}
    tensors |= {
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "step": torch.tensor(7),
        "empty": torch.empty(0, 4, dtype=torch.bfloat16),
        "turned": torch.randn(4, 6).t(),
        "view": torch.randn(100)[10:20:2],
        "stretched": torch.ones(1, 3).expand(4, 3),
        "leaf": torch.nn.Parameter(torch.randn(2, 2)),
    }
    return tensors


def same(left, right):
    assert left.dtype == right.dtype
    return left.shape == right.shape and torch.equal(
        left.detach().double().nan_to_num(), right.detach().double().nan_to_num()
    )


def equal(left, right):
    if left.is_complex():
        return left.dtype == right.dtype and torch.equal(left, right)
    return same(left, right)


@contextmanager
def torch_alone():
    """Torch's own save and load warn in a process without a group."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def write(path, tensors):
    path.mkdir()
    STORAGE.write(path, tensors, None)
    return path


def refused(call, *args):
    with pytest.raises(CheckpointError) as caught:
        call(*args)
    return str(caught.value)


def test_the_plugin_hands_over_a_storage_and_imports_dcp_only_when_it_is_used():
    storage = DcpPlugin().polyscale_checkpoint(None)
    assert isinstance(storage, CheckpointStorage) and storage.name == "dcp"
    use = "import sys, polyscale_standard.checkpoint as c; c.DcpPlugin().polyscale_checkpoint(None)"
    subprocess.run([sys.executable, "-c", f"{use}; assert 'torch' not in sys.modules"], check=True)


def test_torch_itself_reads_what_we_wrote(tmp_path):
    tensors = zoo()
    path = write(tmp_path / "c", wholes(tensors))
    read = {name: torch.zeros(tensor.shape, dtype=tensor.dtype) for name, tensor in tensors.items()}
    with torch_alone():
        dcp.load(read, checkpoint_id=path)
    assert all(equal(read[name], tensors[name]) for name in tensors)


def test_we_read_what_torch_itself_wrote(tmp_path):
    tensors = zoo()
    state = {
        "model": {"nested": dict(tensors)},
        "list": [torch.ones(2), 5],
        "text": "hello",
        "tensors": {1: torch.ones(3)},
    }
    with torch_alone():
        dcp.save(state, checkpoint_id=tmp_path / "c")
    contents = STORAGE.contents(tmp_path / "c")
    assert contents["model.nested.turned"] == StoredTensor((6, 4), torch.float32)
    assert "text" not in contents and contents["list.0"] == StoredTensor((2,), torch.float32)
    read = {f"model.nested.{name}": torch.zeros(tensor.shape, dtype=tensor.dtype) for name, tensor in tensors.items()}
    STORAGE.read(tmp_path / "c", wholes(read), None)
    assert all(equal(read[f"model.nested.{name}"], tensors[name]) for name in tensors)


def test_contents_tell_shape_and_dtype_of_every_tensor(tmp_path):
    tensors = zoo()
    path = write(tmp_path / "c", wholes(tensors))
    assert STORAGE.contents(path) == {name: StoredTensor(tuple(t.shape), t.dtype) for name, t in tensors.items()}


def test_boxes_are_cut_anew_and_dtypes_converted(tmp_path):
    full = torch.arange(5 * 7 * 3, dtype=torch.float32).view(5, 7, 3)
    cuts = (
        ((0, 0, 0), full[:2]),
        ((2, 0, 0), full[2:, :4]),
        ((2, 4, 0), full[2:, 4:, :1]),
        ((2, 4, 1), full[2:, 4:, 1:]),
    )
    saved = LogicalTensor((5, 7, 3), torch.float32, tuple(Box(offsets, data) for offsets, data in cuts))
    path = write(tmp_path / "c", {"w": saved})
    flat = torch.full((1 * 3 + 2 * 7 * 3,), -1.0, dtype=torch.bfloat16)
    other = torch.full((3, 2, 2), -1.0, dtype=torch.float64)
    boxes = (
        Box((1, 6, 0), flat[:3].view(1, 1, 3)),
        Box((2, 0, 0), flat[3:].view(2, 7, 3)),
        Box((1, 3, 1), other, owner=False),
        Box((5, 0, 0), torch.empty(0, 7, 3)),
    )
    STORAGE.read(path, {"w": LogicalTensor((5, 7, 3), torch.float32, boxes)}, None)
    assert torch.equal(flat, full.flatten()[(1 * 7 + 6) * 3 :][: flat.numel()].bfloat16())
    assert torch.equal(other, full[1:4, 3:5, 1:3].double())


def test_every_way_to_cut_a_small_tensor_reads_back(tmp_path):
    full = torch.randn(4, 3)

    def rows(cuts):  # cuts: first rows of the boxes
        ends = [*cuts[1:], 4]
        return [(first, end) for first, end in zip(cuts, ends, strict=True)]

    ways = [[0, *(row for row in (1, 2, 3) if mask >> row & 1)] for mask in range(0, 16, 2)]
    for number, way in enumerate(ways):
        saved = tuple(Box((first, 0), full[first:end]) for first, end in rows(way))
        path = write(tmp_path / str(number), {"w": LogicalTensor((4, 3), torch.float32, saved)})
        for other in ways:
            read = torch.zeros(4, 3)
            boxes = tuple(Box((first, 0), read[first:end]) for first, end in rows(other))
            STORAGE.read(path, {"w": LogicalTensor((4, 3), torch.float32, boxes)}, None)
            assert torch.equal(read, full)


def test_the_logical_dtype_is_what_is_stored(tmp_path):
    path = write(tmp_path / "c", {"w": LogicalTensor((2,), torch.bfloat16, (Box((0,), torch.tensor([1.0, 2.0])),))})
    assert STORAGE.contents(path) == {"w": StoredTensor((2,), torch.bfloat16)}


def test_what_would_lose_or_repeat_elements_is_refused_before_anything_is_written(tmp_path):
    ones = torch.ones(2, 2)

    def said(*boxes, shape=(4, 2)):
        return refused(STORAGE.write, tmp_path, {"w": LogicalTensor(shape, torch.float32, boxes)}, None)

    assert "hold 4 of 8 elements" in said(Box((0, 0), ones))
    assert "hold 4 of 8 elements" in said(Box((0, 0), ones), Box((2, 0), ones, owner=False))
    assert "rank 0 owns [1:3, 0:2] twice" in said(Box((1, 0), ones), Box((2, 0), ones))
    assert "does not lie in tensor 'w'" in said(Box((3, 0), ones))
    assert "does not lie in tensor 'w'" in said(Box((0,), ones))
    assert "begin at (0, 0)" in said(Box((0, 0), ones), Box((0, 0), ones))
    assert "hold 0 of 8 elements" in said()
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_is_missing_or_not_empty_is_refused(tmp_path):
    tensors = wholes({"w": torch.ones(2)})
    assert "no directory here" in refused(STORAGE.write, tmp_path / "c", tensors, None)
    path = write(tmp_path / "c", tensors)
    assert "not empty" in refused(STORAGE.write, path, tensors, None)
    assert "No such file" in refused(STORAGE.contents, tmp_path)
    assert "No such file" in refused(STORAGE.read, tmp_path, tensors, None)


def test_a_read_of_other_tensors_is_refused_and_fills_nothing(tmp_path):
    path = write(tmp_path / "c", wholes({"block.weight": torch.ones(2, 3), "z": torch.ones(2, dtype=torch.complex64)}))
    target = torch.zeros(2, 3)

    def said(name, tensor):
        message = refused(STORAGE.read, path, wholes({"block.weight": target, name: tensor}), None)
        assert not target.any()
        return message

    assert "Did you mean 'block.weight'?" in said("block.weigth", torch.zeros(2, 3))
    assert "holds it with shape [2]" in said("z", torch.zeros(3))
    assert "complex" in said("z", torch.zeros(2))
    STORAGE.read(path, wholes({"block.weight": target}), None)
    assert target.all()


def test_files_cut_short_or_missing_are_errors_that_fill_nothing(tmp_path):
    target = {"a": torch.zeros(500), "b": torch.zeros(500)}
    path = write(tmp_path / "c", wholes({"a": torch.ones(500), "b": torch.ones(500)}))
    data = path / "__0_0.distcp"
    content = data.read_bytes()
    for size in (0, 10, len(content) // 2, len(content) - 1):
        data.write_bytes(content[:size])
        assert "cut short" in refused(STORAGE.read, path, wholes(target), None)
    data.write_bytes(b"x" * len(content))
    assert "cannot be read" in refused(STORAGE.read, path, wholes(target), None)
    data.unlink()
    assert "No such file" in refused(STORAGE.read, path, wholes(target), None)
    metadata = path / ".metadata"
    content = metadata.read_bytes()
    for size in (0, 1, len(content) // 3, len(content) - 1):
        metadata.write_bytes(content[:size])
        assert "damaged" in refused(STORAGE.contents, path)
    assert not target["a"].any() and not target["b"].any()


class Call:
    def __init__(self, function, *args):
        self.reduced = (function, args)

    def __reduce__(self):
        return self.reduced


# names that a lenient unpickler would let through: dotted names, modules of torch, builtins
STOLEN = (
    ("os", "mkdir"),
    ("builtins", "eval"),
    ("builtins", "getattr"),
    ("torch", "load"),
    ("torch", "Size.__class__"),
    ("torch", "os.mkdir"),
    ("torch.serialization", "os.mkdir"),
    ("torch.distributed.checkpoint.metadata", "os.mkdir"),
    ("torch.distributed.checkpoint.filesystem", "FileSystem"),
    ("collections", "abc.sys"),
)


def test_a_malicious_metadata_executes_nothing(tmp_path):
    marker = tmp_path / "ran"
    metadata = tmp_path / ".metadata"
    metadata.write_bytes(pickle.dumps(Call(os.mkdir, str(marker))))
    assert "posix.mkdir" in refused(STORAGE.contents, tmp_path) or os.name == "nt"
    for module, name in STOLEN:
        for protocol_4 in (True, False):
            call = pickle.dumps(str(marker))[2:-1]
            if protocol_4:
                text = b"".join(b"\x8c" + bytes([len(part)]) + part.encode() for part in (module, name))
                stream = b"\x80\x04" + text + b"\x93" + call + b"\x85R."
            else:
                stream = f"c{module}\n{name}\n".encode() + call + b"\x85R."
            metadata.write_bytes(stream)
            assert f"'{module}.{name}'" in refused(STORAGE.contents, tmp_path)
            assert f"'{module}.{name}'" in refused(STORAGE.read, tmp_path, {}, None)
    assert not marker.exists()


def test_a_metadata_that_sets_attributes_of_classes_or_functions_leaves_them_alone(tmp_path):
    from torch.distributed.checkpoint import metadata as real

    for module, name in (("torch.distributed.checkpoint.metadata", "Metadata"), ("torch.serialization", "_get_layout")):
        # push the class or function, push (None, {"evil": 1}), BUILD: the pickle way to setattr
        (tmp_path / ".metadata").write_bytes(f"c{module}\n{name}\n(N}}Vevil\nI1\nstb.".encode())
        refused(STORAGE.contents, tmp_path)
    assert not hasattr(real.Metadata, "evil") and not hasattr(torch.serialization._get_layout, "evil")


def test_metadata_that_points_out_of_its_directory_or_tensor_is_refused(tmp_path):
    tensors = wholes({"w": torch.ones(3)})
    path = write(tmp_path / "c", tensors)
    (tmp_path / "secret").write_bytes((path / "__0_0.distcp").read_bytes())
    good = (path / ".metadata").read_bytes()

    def tampered(change):
        metadata = pickle.loads(good)
        change(metadata)
        (path / ".metadata").write_bytes(pickle.dumps(metadata))
        return refused(STORAGE.read, path, wholes({"w": torch.zeros(3)}), None)

    def elsewhere(where):
        def change(metadata):
            for info in metadata.storage_data.values():
                info.relative_path = where

        return change

    def beyond(metadata):
        metadata.state_dict_metadata["w"].chunks[0].sizes = torch.Size([4])

    def partly(metadata):
        metadata.state_dict_metadata["w"].chunks[0].sizes = torch.Size([2])

    def not_a_table(metadata):
        metadata.storage_data = 5

    assert "points to '../secret'" in tampered(elsewhere("../secret"))
    assert "points to" in tampered(elsewhere(str(tmp_path / "secret")))
    assert "lies outside of it" in tampered(beyond)
    assert "only a part of it" in tampered(partly)
    assert "its storage_data is a int" in tampered(not_a_table)
    (path / ".metadata").write_bytes(pickle.dumps({"a": 1}))
    assert "holds a dict in place of Metadata" in refused(STORAGE.contents, path)


def test_the_temporary_name_of_the_directory_is_not_kept(tmp_path):
    path = write(tmp_path / "c", wholes({"w": torch.ones(3)}))
    assert str(tmp_path).encode() not in (path / ".metadata").read_bytes()
    path.rename(tmp_path / "d")
    read = torch.zeros(3)
    STORAGE.read(tmp_path / "d", wholes({"w": read}), None)
    assert read.all()


@pytest.fixture
def tiny_disk(tmp_path):
    path = tmp_path / "disk"
    path.mkdir()
    try:
        mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32k", "tmpfs", path], capture_output=True)
    except OSError as error:
        pytest.skip(str(error))
    if mounted.returncode:
        pytest.skip(f"cannot mount a small disk: {mounted.stderr.decode().strip()}")
    yield path
    subprocess.run(["umount", "-l", path], check=True)


def test_a_full_disk_is_named_as_the_cause(tiny_disk):
    before = write(tiny_disk / "a", wholes({"w": torch.ones(10)}))
    (tiny_disk / "b").mkdir()
    message = refused(STORAGE.write, tiny_disk / "b", wholes({"w": torch.ones(100_000)}), None)
    assert "rank 0: No space left on device" in message and "Free space" in message and str(tiny_disk / "b") in message
    assert STORAGE.contents(before) == {"w": StoredTensor((10,), torch.float32)}


def test_nothing_is_printed_or_warned(tmp_path, capfd):
    path = write(tmp_path / "c", wholes({"w": torch.ones(3)}))
    STORAGE.read(path, wholes({"w": torch.zeros(3)}), None)
    refused(STORAGE.write, path, wholes({"w": torch.ones(3)}), None)
    assert capfd.readouterr() == ("", "")


def test_a_pickle_of_persistent_ids_is_damaged(tmp_path):
    class Persistent(pickle.Pickler):
        def persistent_id(self, value):
            return "x" if value == 5 else None

    buffer = io.BytesIO()
    Persistent(buffer).dump([5])
    (tmp_path / ".metadata").write_bytes(buffer.getvalue())
    assert "damaged" in refused(STORAGE.contents, tmp_path)
