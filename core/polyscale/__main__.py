"""``python -m polyscale``: the command line under the name of this package."""

from __future__ import annotations

import sys


def main() -> int:
    """Run ``scale``; returns its exit code, or 2 where the command line is not installed."""
    try:
        from polyscale_cli.main import main as scale
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "polyscale_cli":
            raise
        print("Error: the command line is another package. Run: pip install polyscale-cli", file=sys.stderr)
        return 2
    return int(scale())


if __name__ == "__main__":
    sys.exit(main())
