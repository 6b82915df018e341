"""What would be chosen if a training were started with a configuration that names nothing.

Notable: the accelerator's choice is discovery's own, so the report cannot disagree with the engine; the rest follows
the defaults that the configuration documents for "auto".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from polyscale.discovery import choose_accelerator
from polyscale.errors import PolyscaleError
from polyscale_cli.report.probing import Probe

_DEFAULTS: dict[str, tuple[str, ...]] = {
    "parallelism": ("ddp",),
    "precision": ("fp32",),
    "io": ("threads",),
    "checkpoint": ("dcp",),
    "launcher": ("local",),
}


@dataclass(frozen=True)
class Selection:
    """Names chosen by kind, and how the choice of the accelerator came about.

    Attributes:
        names: kind -> name; kinds of which nothing is chosen by default (optimizers, observers) are absent.
        accelerator: the chosen accelerator; None when none can be.
        said: the outcome in a sentence.
    """

    names: Mapping[str, str] = field(default_factory=dict)
    accelerator: Any = None
    said: str = ""


def select(probes: Mapping[str, Sequence[Probe]], *, torch_error: str = "") -> Selection:
    """Choose among ``probes`` (kind -> what was tried).

    Args:
        probes: plugins of the kinds that are asked for.
        torch_error: why torch cannot be imported, in which case nothing is chosen.
    """
    if torch_error:
        return Selection(said=torch_error)
    try:
        choice = choose_accelerator()
    except PolyscaleError as error:
        return Selection(_by_default(probes), said=str(error))
    names = {"accelerator": choice.name, **_by_default(probes)}
    communication = _first(probes.get("communication", ()), choice.object.communications)
    if communication is not None:
        names["communication"] = communication
    return Selection(names, choice.object, f"Training would use {choice.name}.")


def _by_default(probes: Mapping[str, Sequence[Probe]]) -> dict[str, str]:
    chosen = {kind: _first(probes.get(kind, ()), names) for kind, names in _DEFAULTS.items()}
    return {kind: name for kind, name in chosen.items() if name is not None}


def _first(probes: Sequence[Probe], names: Sequence[str]) -> str | None:
    usable = {probe.entry.name for probe in probes if not probe.why}
    return next((name for name in names if name in usable), None)
