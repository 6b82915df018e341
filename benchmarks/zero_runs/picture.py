"""The picture: step time over compute by configuration, with its 95 % interval."""

from __future__ import annotations

from pathlib import Path
from typing import Any

_COLOURS = {"polyscale": "#2b6cb0", "torch": "#dd6b20", "deepspeed": "#6b46c1", "compute": "#718096"}


def draw(table: dict[str, dict[str, Any]], title: str, path: Path) -> None:
    """Write a PNG of the ratios in ``table`` to ``path``.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    names = list(table)[::-1]
    ratios = [table[name]["to_compute"] for name in names]
    figure = Figure(figsize=(8, 1.2 + 0.32 * len(names)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    apart = [[ratio[0] - ratio[1] for ratio in ratios], [ratio[2] - ratio[0] for ratio in ratios]]
    colours = [_COLOURS[table[name]["kind"]] for name in names]
    axes.barh(names, [ratio[0] for ratio in ratios], xerr=apart, color=colours, error_kw={"capsize": 2})
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_xlabel("step time / forward and backward alone (median of rounds, 95 % interval)")
    axes.set_title(title, fontsize=10)
    kinds = dict.fromkeys(table[name]["kind"] for name in table)
    handles = [Patch(color=_COLOURS[kind], label=kind) for kind in kinds]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(kinds), frameon=False)
    figure.savefig(path, dpi=120)
