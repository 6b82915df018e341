"""Writing the folder of a new plugin from templates.

Notable: the templates are files of this package that end in ``.txt``, in folders that are laid over one another;
``string.Template`` fills in ``$name``. The folder must not exist: it is made first, so nothing of anybody's can be
overwritten, and taken away again when a file cannot be written.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Template

from polyscale.errors import PolyscaleError

TEMPLATES = Path(__file__).parent / "templates"
_PACKAGE = "package"
_ENDING = ".txt"


def render(layers: Sequence[str], values: Mapping[str, str]) -> dict[str, str]:
    """Path below the new folder -> text of the file.

    Args:
        layers: folders of templates; of files with the same path the last layer's counts.
        values: what ``$name`` stands for; ``values["package"]`` also names the folder of the package.
    """
    found: dict[str, str] = {}
    for layer in layers:
        for template in sorted((TEMPLATES / layer).rglob(f"*{_ENDING}")):
            parts = list(template.relative_to(TEMPLATES / layer).with_suffix("").parts)
            path = "/".join(values[_PACKAGE] if part == _PACKAGE else part for part in parts)
            found[path] = Template(template.read_text(encoding="utf-8")).substitute(values)
    return found


def write(folder: Path, files: Mapping[str, str]) -> None:
    """Make ``folder`` and write ``files`` (path -> text) into it.

    Raises:
        PolyscaleError: the folder exists, or cannot be written.
    """
    try:
        folder.mkdir(parents=True)
    except FileExistsError as error:
        why = "nothing is ever overwritten"
        fix = "Name another folder with --output, or move that one away"
        raise PolyscaleError(f"{folder} exists", why=why, fix=fix) from error
    except OSError as error:
        raise _unwritable(folder, error) from error
    try:
        for path, text in files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text, encoding="utf-8")
    except OSError as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise _unwritable(folder, error) from error


def _unwritable(folder: Path, error: OSError) -> PolyscaleError:
    why = f"it cannot be written: {error.strerror or error}"
    return PolyscaleError(str(folder), why=why, fix="Name another folder with --output")
