"""``scale config init``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from polyscale.config.init import init
from polyscale.errors import PolyscaleError


def run_init(stage: int, output: Path | None, *, force: bool = False) -> int:
    """Print a configuration for ``stage``, or write it to ``output``; returns the exit code.

    Raises:
        PolyscaleError: there is no such stage; the file exists, or cannot be written.
    """
    text = json.dumps(init(stage), indent=2) + "\n"
    if output is None:
        sys.stdout.write(text)
        return 0
    try:
        with output.open("w" if force else "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        raise PolyscaleError(f"{output} exists", fix="Name another file, or add --force to replace it") from error
    except OSError as error:
        raise PolyscaleError(str(output), why=f"it cannot be written: {error.strerror or error}") from error
    print(f"Wrote {output}. Next: scale config explain {output}")
    return 0
