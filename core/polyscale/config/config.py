"""The configuration: one frozen object that knows where each of its values comes from.

Notable: the vocabulary is DeepSpeed's, so an existing ``ds_config.json`` can be read; ``backends`` and ``topology`` are
new. What a plugin adds at the top level is reached with :meth:`Config.section`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import PrivateAttr

from polyscale.config import compare
from polyscale.config.batch import Batch, batch_numbers
from polyscale.config.origin import Note, Origin, all_origins
from polyscale.config.section import NEW, honoured, needs_plugin
from polyscale.config.sections.backends import BackendsSection, TopologySection
from polyscale.config.sections.checkpoint import CheckpointSection
from polyscale.config.sections.monitors import CometSection, CsvSection, TensorBoardSection, WandbSection
from polyscale.config.sections.optimizer import OptimizerSection, SchedulerSection
from polyscale.config.sections.precision import Bf16Section, DataTypesSection, Fp16Section
from polyscale.config.sections.top import BatchKeys, LogKeys, ModelKeys
from polyscale.config.sections.zero import ZeroSection
from polyscale.config.status import Finding, refuse_unhonoured

_METRICS = "tensorboard.enabled, or the jsonl observer"


class Config(ModelKeys, LogKeys, BatchKeys):
    """A resolved configuration. Made by :func:`polyscale.load_config`."""

    optimizer: OptimizerSection | None = honoured(None, "The optimizer; null: it is given to initialize.")
    scheduler: SchedulerSection | None = honoured(None, "The learning-rate schedule; null: constant, or given.")
    fp16: Fp16Section = honoured(Fp16Section, "fp16 compute.")
    bf16: Bf16Section = honoured(Bf16Section, "bf16 compute.")
    data_types: DataTypesSection = honoured(DataTypesSection, "Dtypes of accumulation, parameters, buffers.")
    zero_optimization: ZeroSection = honoured(ZeroSection, "Sharding over data-parallel ranks.")
    checkpoint: CheckpointSection = honoured(CheckpointSection, "Saving and loading.")
    tensorboard: TensorBoardSection = honoured(TensorBoardSection, "Scalars for TensorBoard.")
    backends: BackendsSection = honoured(BackendsSection, "Which plugin of each kind.", deepspeed=NEW)
    topology: TopologySection = honoured(TopologySection, "Layout of the ranks.", deepspeed=NEW)
    csv_monitor: CsvSection = needs_plugin(CsvSection, "Scalars in CSV files.", nearest=_METRICS)
    wandb: WandbSection = needs_plugin(WandbSection, "Scalars for Weights & Biases.", nearest=_METRICS)
    comet: CometSection = needs_plugin(CometSection, "Scalars for Comet.", nearest=_METRICS)

    _sections: dict[str, Any] = PrivateAttr(default_factory=dict)
    _set: dict[str, Origin] = PrivateAttr(default_factory=dict)
    _findings: tuple[Finding, ...] = PrivateAttr(default=())
    _source: str = PrivateAttr(default="the configuration")

    def attach(
        self, *, sections: dict[str, Any], origins: dict[str, Origin], findings: tuple[Finding, ...], source: str
    ) -> None:
        """Add what is known beside the values; called once, by ``load_config``."""
        self._sections, self._set, self._findings, self._source = sections, origins, findings, source

    @property
    def precision(self) -> str:
        """Name of the precision plugin: "fp32", "bf16", "fp16", or what ``backends.precision`` says."""
        if self.backends.precision != "auto":
            return self.backends.precision
        return "fp16" if self.fp16.enabled else "bf16" if self.bf16.enabled else "fp32"

    def batch(self, dp_world: int) -> Batch:
        """Return the batch sizes on ``dp_world`` data-parallel ranks.

        Raises:
            BatchError: the numbers do not multiply; it shows them and the nearest that do.
        """
        return batch_numbers(
            train=self.train_batch_size,
            micro=self.train_micro_batch_size_per_gpu,
            accumulation=self.gradient_accumulation_steps,
            dp_world=dp_world,
        )

    def section(self, name: str) -> Any:
        """Return a top-level section that a plugin registered (``polyscale.config``), or None when it is not set."""
        return self._sections.get(name)

    @property
    def no_effect(self) -> list[Note]:
        """The set keys that are harmless here, each with the reason."""
        return self.notes(frozenset())

    def notes(self, honoured: frozenset[str]) -> list[Note]:
        """As ``no_effect``, less what a chosen plugin honours (dotted keys; a section's name covers all below)."""
        return [Note(f.path, f.reason) for f in self._findings if f.is_note and not f.covered_by(honoured)]

    def require(self, honoured: frozenset[str], *, plugins: frozenset[str] | None = None) -> None:
        """Refuse the set keys that need a plugin when none of the chosen plugins honours them.

        Args:
            honoured: dotted keys that the chosen plugins honour; a section's name covers all below it.
            plugins: names of all installed plugins; when given, an unknown name in ``backends.options`` is refused.

        Raises:
            NotBuiltError: a set key is honoured by none; it names the key and the nearest thing that works.
            UnknownKeyError: options for a plugin that does not exist.
        """
        refuse_unhonoured(self._findings, honoured, self._source)
        if plugins is not None:
            compare.refuse_unknown_options(self.backends.options, plugins)

    @property
    def origins(self) -> Mapping[str, Origin]:
        """Dotted path -> where its value comes from, for every value."""
        return all_origins(self.as_dict(), self._set)

    def as_dict(self) -> dict[str, Any]:
        """Return every value in the vocabulary of the file, JSON types only; ``load_config`` reads it again."""
        values = self.model_dump()
        for name, value in self._sections.items():
            values[name] = value.model_dump() if hasattr(value, "model_dump") else value
        return values

    def digest(self) -> str:
        """Return a hash, stable between processes and hosts, of all that must be equal on every rank."""
        return compare.digest(self.as_dict())

    def differences(self, other: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
        """Return (dotted path, mine, theirs) for all that must be equal on every rank and is not."""
        return compare.differences(self.as_dict(), other)
