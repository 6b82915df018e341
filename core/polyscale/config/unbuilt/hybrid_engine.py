"""``hybrid_engine``: generate with the model that is trained.

Notable: the keys stand in a data file, because one of them carries a vendor's name, which code of core never does.
"""

import json
from pathlib import Path

from polyscale.config.unbuilt.table import not_built

SECTION = not_built(
    "Train and generate in turns.",
    json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8")),
    nearest="exporting the weights and generating in another process",
)
