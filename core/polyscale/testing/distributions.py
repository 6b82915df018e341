"""Writing an installed distribution by hand, to test what discovery does with good and bad plugins.

Notable: it is what an installer leaves behind (a module and its ``dist-info``), so everything that reads metadata sees
a real distribution; only its folder must be put on ``sys.path``.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path


def write_distribution(
    folder: Path,
    name: str,
    *,
    entry_points: Mapping[str, Mapping[str, str]],
    modules: Mapping[str, str] | None = None,
    version: str = "1.0",
    requires: Sequence[str] = (),
) -> Path:
    """Write a distribution into ``folder`` as if it were installed there.

    Args:
        folder: what is to be put on ``sys.path``; made if absent.
        name: name of the distribution ("acme-accelerator").
        entry_points: group -> entry-point name -> ``module:class``.
        modules: module name -> source text (indentation in common is removed).
        version: its version.
        requires: its requirements ("torch==2.8.*").

    Returns:
        ``folder``.
    """
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    lines += [f"Requires-Dist: {requirement}" for requirement in requires]
    (info / "METADATA").write_text("\n".join(lines) + "\n")
    groups = [
        f"[{group}]\n" + "\n".join(f"{key} = {value}" for key, value in entries.items())
        for group, entries in entry_points.items()
    ]
    (info / "entry_points.txt").write_text("\n\n".join(groups) + "\n")
    for module, source in (modules or {}).items():
        (folder / f"{module}.py").write_text(textwrap.dedent(source))
    return folder
