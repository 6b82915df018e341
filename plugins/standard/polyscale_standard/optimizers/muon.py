"""Muon: momentum, orthogonalised matrix by matrix; everything that is not a hidden matrix gets AdamW.

Notable: embeddings and output heads are found by name (``adam_patterns``, on whole names or single components, tied
names included). As in DeepSpeed, ``muon_lr`` and ``adam_lr`` each fall back to ``lr``. Newton-Schulz runs in the
dtype of the masters unless ``ns_dtype`` is "bf16". ``ns_method`` is accepted: both of DeepSpeed's methods compute the
same polynomial. Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks".
"""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from polyscale.errors import UnsupportedError
from polyscale.hooks import PluginContext, hookimpl
from polyscale.interfaces.optimizer import Granularity, OptimizerGroup
from polyscale_standard.optimizers import hyper
from polyscale_standard.optimizers.factory import TableFactory
from polyscale_standard.optimizers.torch_groups import torch_groups

if TYPE_CHECKING:
    import torch

    from polyscale.parameters.store import ParameterStore

DEFAULT_MUON_LR = 0.02
DEFAULT_ADAM_LR = 3e-4
ADAM_PATTERNS = ("*embed*", "wte", "wpe", "lm_head", "head", "*_head")


def _patterns(value: Any) -> tuple[str, ...]:
    patterns = (value,) if isinstance(value, str) else tuple(value)
    if not all(isinstance(pattern, str) for pattern in patterns):
        raise TypeError
    return patterns


_HYPERS = {
    "lr": hyper.number(None),
    "muon_lr": hyper.number(None),
    "adam_lr": hyper.number(None),
    "momentum": hyper.number(0.95, below=1.0),
    "nesterov": hyper.flag(True),
    "weight_decay": hyper.number(0.0),
    "betas": hyper.betas((0.9, 0.95)),
    "eps": hyper.number(1e-10),
    "ns_steps": hyper.whole(5),
    "ns_dtype": hyper.choice("master", "bf16"),
    "ns_method": hyper.choice("gram", "standard"),
    "adjust_lr": hyper.choice("original", "match_rms_adamw"),
    "adam_patterns": hyper.Hyper(ADAM_PATTERNS, _patterns, "a list of name patterns", per_group=False),
    "per_head_muon": hyper.flag(False, per_group=False),
}


class MuonFactory(TableFactory):
    """Makes Muon."""

    hypers = _HYPERS
    name = "muon"
    granularity: Granularity = "matrix"

    def check(self, params: dict[str, Any]) -> dict[str, Any]:
        """See :class:`polyscale.interfaces.optimizer.OptimizerFactory`.

        Raises:
            ConfigError: a hyper-parameter is unknown or out of range.
            UnsupportedError: ``per_head_muon``.
        """
        full = super().check(params)
        if full["per_head_muon"]:
            raise UnsupportedError(
                "optimizer.params.per_head_muon=true",
                why="Matrices are orthogonalised whole",
                fix="Leave it out",
            )
        return full

    def build(
        self, groups: list[OptimizerGroup], params: dict[str, Any], store: ParameterStore
    ) -> torch.optim.Optimizer:
        """Make the optimizer. Local tensors may have any shape; ``store.infos`` tells the matrices. Collective."""
        from polyscale_standard.optimizers.muon_step import Muon

        full = self.check(params)
        split = []
        for group in groups:
            options = full | self.check_group(group.options)
            split += _split(group, options, store)
        return Muon(torch_groups(split, lambda group: group.options), store)


def is_matrix(name: str, store: ParameterStore, patterns: Iterable[str]) -> bool:
    """Whether Muon orthogonalises a parameter: two dimensions, and no name of it matches ``patterns``."""
    info = store.infos[name]
    return len(info.shape) == 2 and not any(_matches(each, pattern) for each in info.names for pattern in patterns)


def _matches(name: str, pattern: str) -> bool:
    return any(fnmatchcase(part, pattern) for part in (name, *name.split(".")))


def _split(group: OptimizerGroup, options: dict[str, Any], store: ParameterStore) -> list[OptimizerGroup]:
    """Cut one group in two: matrices for Muon, the rest for AdamW, each with the hyper-parameters it reads."""
    matrices: dict[str, torch.nn.Parameter] = {}
    others: dict[str, torch.nn.Parameter] = {}
    for name, param in group.params.items():
        (matrices if is_matrix(name, store, options["adam_patterns"]) else others)[name] = param
    shared = {"weight_decay": options["weight_decay"]}
    muon = {key: options[key] for key in ("momentum", "nesterov", "ns_steps", "ns_dtype", "adjust_lr")}
    adam = {key: options[key] for key in ("betas", "eps")}
    return [
        OptimizerGroup(matrices, {"algorithm": "muon", "lr": _lr(options, "muon_lr", DEFAULT_MUON_LR)} | shared | muon),
        OptimizerGroup(others, {"algorithm": "adamw", "lr": _lr(options, "adam_lr", DEFAULT_ADAM_LR)} | shared | adam),
    ]


def _lr(options: dict[str, Any], own: str, default: float) -> float:
    candidates = (options[own], options["lr"], default)
    return next(float(lr) for lr in candidates if lr is not None)


class MuonPlugin:
    """Muon with AdamW for what is not a hidden matrix."""

    interface_version = (1, 0)

    @hookimpl
    def polyscale_optimizer(self, context: PluginContext) -> MuonFactory:
        """Hand over the factory of Muon."""
        return MuonFactory()
