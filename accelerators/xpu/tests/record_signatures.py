"""Read the names and signatures of ``torch.xpu`` from the installed torch, and write ``torch_xpu.json`` here."""

import inspect
from pathlib import Path

import torch

from polyscale.testing.signatures import Record, exported_names, signatures

RECORD = Path(__file__).with_name("torch_xpu.json")
FILES = ("streams", "graphs", "random", "memory", "__init__")


def read() -> Record:
    """Names and signatures of this torch's ``torch.xpu``, those of its ``__all__``."""
    folder = Path(inspect.getsourcefile(torch.xpu)).parent
    texts = [(folder / f"{name}.py").read_text("utf-8") for name in FILES]
    found = signatures(texts, exported=exported_names(texts[-1]))
    return Record("torch.xpu", torch.__version__.partition("+")[0], "syntax trees of torch/xpu/*.py", found)


if __name__ == "__main__":
    read().write(RECORD)
