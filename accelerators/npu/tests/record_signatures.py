"""Read the names and signatures of ``torch.npu`` from a torch-npu wheel: ``record_signatures.py WHEEL``.

Writes ``torch_npu.json`` beside itself. The wheel is read, never installed: its import needs the device's libraries.
"""

import re
import sys
import zipfile
from pathlib import Path

from polyscale.testing.signatures import Record, exported_names, signatures

RECORD = Path(__file__).with_name("torch_npu.json")
# Where torch_npu/npu/__init__.py takes its names from, in the order of its imports; its own come last.
FILES = ("utils", "streams", "autocast_utils", "backends", "_backends", "graphs", "random", "memory", "__init__")


def read(wheel: Path) -> Record:
    """Names and signatures of the wheel's ``torch_npu.npu``, those of its ``__all__``."""
    version = re.match(r"torch_npu-([^-]+)-", wheel.name)
    assert version, f"{wheel.name} is not a wheel of torch-npu"
    with zipfile.ZipFile(wheel) as archive:
        texts = [archive.read(f"torch_npu/npu/{name}.py").decode() for name in FILES]
    found = signatures(texts, exported=exported_names(texts[-1]))
    source = "wheel of torch-npu from the Python package index, syntax trees of torch_npu/npu/*.py"
    return Record("torch.npu", version[1], source, found)


if __name__ == "__main__":
    read(Path(sys.argv[1])).write(RECORD)
