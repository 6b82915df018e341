"""What came of a demo: the losses of a run, whether they are what was promised, and their picture."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path


@dataclass
class Curve:
    """Losses by step, and what else rank 0 has said."""

    training: list[tuple[int, float]] = field(default_factory=list)
    validation: list[tuple[int, float]] = field(default_factory=list)
    speeds: list[float] = field(default_factory=list)
    sentence: str = ""

    def add(self, record: dict[str, Any]) -> None:
        """Take one record of the example."""
        if "loss" in record:
            self.training.append((record["step"], record["loss"]))
            self.speeds.append(record["tokens_per_s"])
        if "validation_loss" in record:
            self.validation.append((record["step"], record["validation_loss"]))
        self.sentence = record.get("sentence", self.sentence)

    @property
    def tokens_per_s(self) -> float:
        """Harmonic mean: equal numbers of tokens per step over the time they took; the first step warms up."""
        speeds = self.speeds[1:] or self.speeds
        return len(speeds) / sum(1 / speed for speed in speeds)


def judge(result: dict[str, Any], goal: str, *, vocabulary: int) -> list[str]:
    """What was promised and missed, in words."""
    missed = []
    uniform = math.log(vocabulary)
    if abs(result["val_loss_first"] - uniform) > 0.3:
        missed.append(f"the first validation loss is {result['val_loss_first']}, not ln({vocabulary}) = {uniform:.2f}")
    last, resumed = result["val_loss_last"], result["resumed_val_loss"]
    if not abs(last - resumed) <= 1e-4:
        missed.append(f"the validation loss was {last} when saved and {resumed} when loaded")
    bound = math.inf if goal == "none" else result["bigram_loss"] if goal == "bigram" else float(goal)
    if not last < bound:
        missed.append(f"the validation loss is {last}, not below {bound}")
    return missed


def plot(path: Path, curve: Curve, resumed: Curve, unigram: float, bigram: float) -> None:
    """Draw the losses with the baselines beside them."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    axes.plot(*zip(*curve.training, *resumed.training, strict=True), color="0.75", label="training")
    axes.plot(*zip(*curve.validation, strict=True), "o-", label="validation")
    axes.plot(*zip(*resumed.validation, strict=True), "s-", label="validation, resumed on 1 rank")
    for name, loss, style in (("unigram", unigram, ":"), ("bigram", bigram, "--")):
        axes.axhline(loss, color="black", linestyle=style, linewidth=1, label=f"{name} ({loss:.2f})")
    axes.set_xlabel("update")
    axes.set_ylabel("loss (nats per token)")
    axes.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
