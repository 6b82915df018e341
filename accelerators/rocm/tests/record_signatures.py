"""Read the names and signatures of ``torch.cuda`` (which ROCm's torch shares) from the installed torch.

Writes ``torch_cuda.json`` beside this file. The Python files are the same in CUDA, ROCm and CPU builds of torch.
"""

import inspect
from pathlib import Path

import torch

from polyscale.testing.signatures import Record, exported_names, signatures

RECORD = Path(__file__).with_name("torch_cuda.json")
FILES = ("streams", "graphs", "random", "memory", "__init__")


def read() -> Record:
    """Names and signatures of this torch's ``torch.cuda``, those of its ``__all__``."""
    folder = Path(inspect.getsourcefile(torch.cuda)).parent
    texts = [(folder / f"{name}.py").read_text("utf-8") for name in FILES]
    found = signatures(texts, exported=exported_names(texts[-1]))
    return Record("torch.cuda", torch.__version__.partition("+")[0], "syntax trees of torch/cuda/*.py", found)


if __name__ == "__main__":
    read().write(RECORD)
