"""Read the names and signatures of ``torch.hpu`` from a checkout: ``record_signatures.py FOLDER COMMIT``.

FOLDER holds ``python_packages/habana_frameworks/torch/hpu`` of https://github.com/HabanaAI/gaudi-pytorch-bridge, which
is the source of the plugin ``habana-torch-plugin``. Writes ``torch_hpu.json`` beside itself. Nothing is imported: the
bridge needs the device's libraries.
"""

import sys
from pathlib import Path

from polyscale.testing.signatures import Record, signatures

RECORD = Path(__file__).with_name("torch_hpu.json")
FILES = ("events", "streams", "random", "memory", "__init__")
SOURCE = "github.com/HabanaAI/gaudi-pytorch-bridge, python_packages/habana_frameworks/torch/hpu/*.py"


def read(folder: Path, commit: str) -> Record:
    """Public names and signatures of the module as the bridge defines it in eager mode."""
    found = signatures((folder / f"{name}.py").read_text("utf-8") for name in FILES)
    return Record("torch.hpu", commit, SOURCE, found)


if __name__ == "__main__":
    read(Path(sys.argv[1]), sys.argv[2]).write(RECORD)
