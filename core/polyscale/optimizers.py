"""What core itself knows about optimizers: their granularity, who must be refused, how parameters fall into groups.

Notable: a class is taken as elementwise only when it is exactly one of torch's, or says so by an attribute
``granularity``: a subclass may look at whole parameters in its ``step``. A group pattern that matches nothing is an
error, because it is a typing mistake that would train with other hyper-parameters than asked for.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, cast, get_args

from polyscale.errors import ConfigError, UnsupportedError, nearest
from polyscale.interfaces.optimizer import Granularity
from polyscale.parameters.names import public_name

if TYPE_CHECKING:
    import torch
    from torch import nn

    from polyscale.config.sections.optimizer import OptimizerGroupSection, OptimizerSection
    from polyscale.parameters.info import ParamInfo

_ELEMENTWISE = (
    "ASGD",
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
    "SGD",
)

_WHOLE = {"adafactor": "it factors second moments by the rows and columns of whole matrices"}

WAYS_OUT = (
    f"Use one that works element by element (Lion, {', '.join(_ELEMENTWISE)}), LAMB, Muon, or "
    "zero_optimization.stage 0; a class of your own that updates every element by itself says granularity = 'element'"
)
"""What to do about an optimizer that cannot work on parts of tensors."""

_REFUSED = {
    "LBFGS": (
        "Its line search evaluates the loss many times inside one step, over one flat vector of all parameters",
        "Use a first-order optimizer, such as AdamW",
    ),
    "SparseAdam": (
        "It needs sparse gradients, and gradients are reduced dense",
        "Use AdamW",
    ),
    "Muon": (
        "It is given shards, and orthogonalising shards is another update",
        'Use "optimizer": {"type": "Muon"}, which gathers whole matrices',
    ),
}


def granularity_of(optimizer: torch.optim.Optimizer | type[torch.optim.Optimizer]) -> Granularity:
    """Return at which granularity an optimizer's mathematics works; an unknown class counts as ``tensor``.

    Raises:
        UnsupportedError: a class of torch that cannot work on shards, with what to use instead.
        ConfigError: the class declares a granularity that does not exist.
    """
    cls = optimizer if isinstance(optimizer, type) else type(optimizer)
    declared = getattr(cls, "granularity", None)
    if declared is not None:
        if declared not in get_args(Granularity):
            raise ConfigError(
                f"{cls.__name__}.granularity={declared!r}",
                why="There is no such granularity",
                fix="Valid: " + ", ".join(get_args(Granularity)),
            )
        return cast(Granularity, declared)
    refused = next((base.__name__ for base in cls.__mro__ if _of_torch(base) and base.__name__ in _REFUSED), None)
    if refused is not None:
        why, fix = _REFUSED[refused]
        raise UnsupportedError(f"Optimizer torch.optim.{refused}", why=why, fix=fix)
    return "element" if _of_torch(cls) and cls.__name__ in _ELEMENTWISE else "tensor"


def refuse_flat(optimizer: object, granularity: Granularity, *, name: str = "") -> None:
    """Refuse an optimizer that looks at whole tensors where it would be given 1-D ranges of them.

    The engine calls it, before an optimizer is built or changed, where ``store.flat`` is set; a data-parallel plugin
    may call it too, in ``attach``.

    Args:
        optimizer: the optimizer, its class, or the factory that will make it.
        granularity: of the optimizer.
        name: what to call it; "": the name of its class.

    Raises:
        UnsupportedError: the granularity is "tensor".
    """
    if granularity != "tensor":
        return
    cls = optimizer if isinstance(optimizer, type) else type(optimizer)
    name = name or cls.__name__
    unknown = "nothing says that it updates every element by itself, so it may use norms or shapes of whole tensors"
    declared = "it says that it needs whole tensors" if getattr(cls, "granularity", None) == "tensor" else unknown
    raise UnsupportedError(
        f"Optimizer {name} over flat shards",
        why=f"{_WHOLE.get(name.lower(), declared)}; of a 1-D range of each tensor it would compute another update",
        fix=WAYS_OUT,
    )


def norm_parameters(modules: Iterable[tuple[str, nn.Module]]) -> set[str]:
    """Return the names of parameters held directly by normalisation layers.

    A layer normalises when its class is called so ("LayerNorm", "LlamaRMSNorm", "BatchNorm2d").

    Args:
        modules: (name, module) pairs, as from ``model.named_modules()``.
    """
    found = set()
    for name, module in modules:
        if "norm" in type(module).__name__.lower():
            prefix = f"{public_name(name)}." if public_name(name) else ""
            found |= {prefix + own for own, _ in module.named_parameters(recurse=False, remove_duplicate=False)}
    return found


def split_groups(
    section: OptimizerSection | None, infos: Mapping[str, ParamInfo], norms: Collection[str] = ()
) -> list[tuple[list[str], dict[str, Any]]]:
    """Sort trained parameters into groups: (names, hyper-parameters), in the section's order, the rest last.

    The first group with a matching pattern takes a parameter; any of its tied names may match. With
    ``skip_decay_for_norms_and_biases``, parameters of at most one dimension, names that end in "bias", and ``norms``
    get weight decay 0, unless their group states its own ``weight_decay``. Empty groups are left out.

    Args:
        section: the optimizer's configuration; None: one group without options.
        infos: every parameter of the model by name; tied ones once or under each name.
        norms: names from :func:`norm_parameters`.

    Raises:
        ConfigError: a pattern matches no parameter.
    """
    groups = section.groups if section is not None else []
    skip_decay = section is not None and section.skip_decay_for_norms_and_biases
    trained = {info.fqn: info for info in infos.values() if info.requires_grad}
    _refuse_idle_patterns(groups, infos)
    buckets: list[list[str]] = [[] for _ in range(len(groups) + 1)]
    for name, info in trained.items():
        place = next((i for i, group in enumerate(groups) if _takes(group, info)), len(groups))
        buckets[place].append(name)
    result: list[tuple[list[str], dict[str, Any]]] = []
    for names, options in zip(buckets, [*(dict(group.params) for group in groups), {}], strict=True):
        spared = [name for name in names if _spared(trained[name], norms)]
        if not skip_decay or "weight_decay" in options:
            spared = []
        decayed = [name for name in names if name not in set(spared)]
        result += [(decayed, options)] if decayed else []
        result += [(spared, options | {"weight_decay": 0.0})] if spared else []
    return result


def _of_torch(cls: type) -> bool:
    return cls.__module__ == "torch.optim" or cls.__module__.startswith("torch.optim.")


def _takes(group: OptimizerGroupSection, info: ParamInfo) -> bool:
    return any(fnmatchcase(name, pattern) for name in info.names for pattern in group.match)


def _spared(info: ParamInfo, norms: Collection[str]) -> bool:
    return len(info.shape) <= 1 or any(name in norms or name.endswith("bias") for name in info.names)


def _refuse_idle_patterns(groups: Sequence[OptimizerGroupSection], infos: Mapping[str, ParamInfo]) -> None:
    names = [name for info in infos.values() for name in info.names]
    for group in groups:
        for pattern in group.match:
            if not any(fnmatchcase(name, pattern) for name in names):
                close = nearest(pattern, names)
                raise ConfigError(
                    f"optimizer.groups pattern {pattern!r}",
                    why="It matches no parameter of the model",
                    fix=(f"Did you mean {close!r}? " if close else "") + "Patterns are matched on whole names, "
                    'as in "transformer.*.bias"; model.named_parameters() lists them',
                )
