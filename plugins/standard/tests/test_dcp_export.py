import torch
from safetensors.torch import load_file

from polyscale.checkpoint.export import export_safetensors
from polyscale.hooks import PluginContext
from polyscale_standard.io import ThreadsPlugin


def test_the_export_writes_through_the_threads_io(tmp_path):
    torch.manual_seed(0)
    tensors = {f"w{i}": torch.randn(3 + i, 5).to(dtype) for i, dtype in enumerate((torch.float32, torch.bfloat16) * 3)}
    tensors["turned"], tensors["scalar"], tensors["empty"] = torch.randn(4, 6).t(), torch.tensor(1), torch.empty(0, 2)
    plan = [(name, tensor.shape, tensor.dtype) for name, tensor in tensors.items()]
    io = ThreadsPlugin().polyscale_io(PluginContext("threads"))
    try:
        files = export_safetensors(iter(tensors.items()), plan, tmp_path, io, max_shard_bytes=200)
    finally:
        io.close()
    assert len(files) > 2
    read = {name: value for file in files[:-1] for name, value in load_file(file).items()}
    assert read.keys() == tensors.keys()
    assert all(torch.equal(read[name], tensor) and read[name].dtype == tensor.dtype for name, tensor in tensors.items())
