"""Makes ``shm_ranks`` importable here and on the ranks, which take over this process's path; builds the transport."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))


@pytest.fixture(autouse=True, scope="session")
def transport() -> None:
    """Have the extension before the first case of ranks, which would be given up before it is built."""
    if os.environ.get("POLYSCALE_TEST_COMMUNICATION", "shm") == "shm":
        from polyscale_shm import native

        native()
