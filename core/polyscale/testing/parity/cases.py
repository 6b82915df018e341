"""The cases of the parity suite: every pair of settings occurs together in some case.

Notable: the awkward parts of a model (a module used twice, an unused branch, ...) are independent switches, so pairs
of them meet as well. All pairs meet in float64, where the bar is sharpest, and again in fp32 or bf16. ``FACTORS`` and
``DTYPES`` are the list; ``parity_cases`` turns it into cases for one plugin.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from polyscale.testing.parity.covering import Value, covering_array

STEPS = 4
BATCH = 2
CLIP_AT = 0.5

FACTORS: dict[str, tuple[Value, ...]] = {
    "accumulation": (1, 3),
    "optimizer": ("sgd", "adamw", "muon", "lion", "lamb"),
    "clipped": (False, True),
    "reuse": (False, True),
    "branch": ("none", "one-rank", "no-rank"),
    "tied": (False, True),
    "frozen": (False, True),
    "empty": (False, True),
    "idle": (False, True),
}

DTYPES = (("fp64",), ("fp32", "bf16"))

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}},
    "adamw": {"type": "AdamW", "params": {"lr": 0.01, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}},
    "lion": {"type": "Lion", "params": {"lr": 0.003, "betas": [0.9, 0.99], "weight_decay": 0.1}},
    "lamb": {"type": "Lamb", "params": {"lr": 0.01, "betas": [0.9, 0.95], "eps": 1e-6, "weight_decay": 0.1}},
    "muon": {
        "type": "Muon",
        "params": {
            "muon_lr": 0.02,
            "adam_lr": 0.01,
            "momentum": 0.95,
            "betas": [0.9, 0.95],
            "eps": 1e-8,
            "weight_decay": 0.1,
        },
    },
}


@dataclass(frozen=True)
class Task:
    """What is trained, whatever spreads it: two cases with equal tasks have one oracle.

    Attributes:
        accumulation: micro-steps per update.
        optimizer: a key of ``OPTIMIZERS``.
        dtype: of the model; "bf16" computes in bf16 with fp32 masters, gradients and optimizer.
        clipped: whether the gradient norm is clipped at ``CLIP_AT``.
        reuse: a block is called twice in a forward.
        branch: a layer that not every forward uses: "none" (no such layer), "one-rank" (rank 0 never uses it),
            "no-rank" (nobody uses it in every other update).
        tied: the head's weight is the embedding's.
        frozen: one block and a part of another do not require gradients.
        empty: a parameter has zero elements.
        idle: a layer is never used.
        world: number of ranks.
    """

    accumulation: int = 1
    optimizer: str = "sgd"
    dtype: Literal["fp64", "fp32", "bf16"] = "fp64"
    clipped: bool = False
    reuse: bool = False
    branch: Literal["none", "one-rank", "no-rank"] = "none"
    tied: bool = False
    frozen: bool = False
    empty: bool = False
    idle: bool = False
    world: int = 2

    def uses_branch(self, step: int, rank: int) -> bool:
        """Whether ``rank`` uses the branch in the micro-steps of update ``step`` (from 0)."""
        return {"none": False, "one-rank": rank > 0, "no-rank": step % 2 == 1}[self.branch]

    def __str__(self) -> str:
        switches = {name: getattr(self, name) for name in ("reuse", "tied", "frozen", "empty", "idle")}
        words = [f"acc{self.accumulation}", self.optimizer, self.dtype, "clipped" if self.clipped else ""]
        words += [f"branch-{self.branch}" if self.branch != "none" else ""]
        words += [name for name, on in switches.items() if on]
        return "-".join(word for word in words if word)


@dataclass(frozen=True)
class Case:
    """A task, and the plugins that carry it out.

    Attributes:
        task: what is trained.
        plugin: name of the data-parallel plugin.
        stage: ZeRO stage.
        backends: further (kind, name) pairs of the configuration's ``backends`` section.
        extra: further top-level (key, value) pairs of the configuration.
    """

    task: Task
    plugin: str
    stage: int
    backends: tuple[tuple[str, str], ...] = ()
    extra: tuple[tuple[str, Any], ...] = ()

    @property
    def accelerator(self) -> str:
        """Name of the accelerator, cpu unless ``backends`` names another."""
        return dict(self.backends).get("accelerator", "cpu")

    def config(self) -> dict[str, Any]:
        """The configuration for ``polyscale.initialize``."""
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": BATCH,
            "gradient_accumulation_steps": self.task.accumulation,
            "optimizer": OPTIMIZERS[self.task.optimizer],
            "zero_optimization": {"stage": self.stage},
            "backends": {"accelerator": "cpu", "data_parallel": self.plugin, **dict(self.backends)},
        }
        if self.task.dtype == "bf16":
            config["bf16"] = {"enabled": True}
        if self.task.clipped:
            config["gradient_clipping"] = CLIP_AT
        return config | dict(self.extra)

    def __str__(self) -> str:
        names = "-".join(name for _, name in self.backends)
        return "-".join(filter(None, [self.plugin, names, f"stage{self.stage}", str(self.task)]))


def parity_cases(
    plugin: str,
    stages: Sequence[int],
    *,
    level: Literal["quick", "full"] = "quick",
    extra: dict[str, Any] | None = None,
    **backends: str,
) -> list[Case]:
    """List the cases for one data-parallel plugin.

    Args:
        plugin: its name, as in ``backends.data_parallel``.
        stages: ZeRO stages to try it at.
        level: "quick" covers every pair of settings, "full" every three settings.
        extra: further top-level keys of the configuration (hashable values).
        backends: further entries of ``backends``, as ``communication="shm"`` or ``accelerator="sim"``.
    """
    strength = {"quick": 2, "full": 3}[level]
    rows: list[dict[str, Any]] = []
    for dtypes in DTYPES:
        rows += covering_array({"stage": tuple(stages), "dtype": dtypes, **FACTORS}, strength=strength)
    others = tuple(backends.items()), tuple((extra or {}).items())
    cases = [Case(Task(**row), plugin, stage, *others) for row in rows for stage in [row.pop("stage")]]
    return sorted(cases, key=lambda case: case.stage)
