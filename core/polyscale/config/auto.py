"""Resolve ``"auto"``, or say that nothing here can; it is never dropped.

Notable: some keys have "auto" among their own values (``backends.*``, bucket sizes a plugin chooses): it stays, and
their owner resolves it. For the rest there is one function each, which returns the value and how it was found.
Another library that fills in values itself gives them as ``load_config(..., auto={"optimizer.params.lr": 1e-4})``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from polyscale.config.arguments import as_number
from polyscale.config.batch import ACCUMULATION, MICRO, TRAIN
from polyscale.config.errors import UnresolvedAutoError
from polyscale.config.origin import Origin
from polyscale.config.section import Status
from polyscale.config.tree import Node

DEFAULT = object()
"""In place of a value: take the key out, so that its default or the arithmetic gives it."""

Found = tuple[Any, str] | None
Path = tuple[str | int, ...]


def resolve_autos(
    tree: Node, values: dict[str, Any], origins: dict[str, Origin], given: Mapping[str, Any]
) -> list[UnresolvedAutoError]:
    """Replace every "auto" in ``values`` (in place), note in ``origins`` how, and return what could not be.

    Args:
        tree: the known keys.
        values: the configuration as read.
        origins: dotted path -> origin, completed here.
        given: values by dotted path from the caller of ``load_config``.
    """
    paths = list(_autos(tree, values, ()))
    unresolved = []
    found = {path: _resolve(tree, values, path, given) for path in paths}
    for path, result in found.items():
        name = dotted(path)
        if result is None:
            unresolved.append(name)
            result = (DEFAULT, "unresolved")
        _replace(values, path, result[0])
        kind = Origin("argument", "auto=") if name in given else Origin("auto", result[1])
        origins[name] = kind
    return [unresolved_error(unresolved)] if unresolved else []


def unresolved_error(paths: Sequence[str]) -> UnresolvedAutoError:
    """Return the error for the keys at ``paths``, whose "auto" nothing can tell."""
    error = UnresolvedAutoError(
        ", ".join(f'{path} = "auto"' for path in paths),
        why="nothing here tells the value (another library may fill it in before polyscale sees it)",
        fix="Write " + "; ".join(f"{path}: {_ADVICE.get(path, 'the value')}" for path in paths),
    )
    error.paths = tuple(paths)
    return error


def dotted(path: Path) -> str:
    """Return the path as written in errors: ``optimizer.groups[0].params.lr``."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".")


def _autos(node: Node, value: Any, path: Path) -> Iterator[Path]:
    if node.status not in (Status.HONOURED, Status.NO_EFFECT) and not node.is_on(value):
        return
    if value == "auto" and not node.takes_auto:
        yield path
    elif isinstance(value, dict):
        for key, entry in value.items():
            child = node.children.get(key) or node.each or Node(free=True, takes_auto=node.takes_auto)
            yield from _autos(child, entry, (*path, key))
    elif isinstance(value, list):
        for index, entry in enumerate(value):
            yield from _autos(node.each or Node(free=True, takes_auto=node.takes_auto), entry, (*path, index))


def _resolve(tree: Node, values: Mapping[str, Any], path: Path, given: Mapping[str, Any]) -> Found:
    name = dotted(path)
    if name in given:
        return given[name], ""
    if _without_effect(tree, path):
        return DEFAULT, "it has no effect here"
    resolver = _RESOLVERS.get(name)
    return resolver(values) if resolver else None


def _without_effect(node: Node, path: Path) -> bool:
    for part in path:
        node = (node.children.get(part) if isinstance(part, str) else None) or node.each or Node()
        if node.status is Status.NO_EFFECT:
            return True
    return False


def _replace(values: Any, path: Path, value: Any) -> None:
    for part in path[:-1]:
        values = values[part]
    if value is not DEFAULT:
        values[path[-1]] = value
    elif isinstance(values, dict):
        del values[path[-1]]


def _get(values: Mapping[str, Any], *path: str) -> Any:
    value: Any = values
    for part in path:
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _by_arithmetic(values: Mapping[str, Any]) -> Found:
    if _number(values.get(TRAIN)) or _number(values.get(MICRO)):
        return DEFAULT, "by arithmetic from the other batch numbers and the data-parallel ranks"
    return None


def _enabled(precision: str) -> Callable[[Mapping[str, Any]], Found]:
    def resolve(values: Mapping[str, Any]) -> Found:
        chosen = _get(values, "backends", "precision") or "auto"
        other = "bf16" if precision == "fp16" else "fp16"
        if chosen != "auto":
            return chosen == precision, f"backends.precision is {chosen}"
        if _get(values, other, "enabled") is True:
            return False, f"{other} is enabled"
        return False, f"nothing asks for {precision}; write true here, or backends.precision"

    return resolve


def _max_lr(values: Mapping[str, Any]) -> Found:
    lr = as_number(_get(values, "optimizer", "params", "lr"))
    return (lr, "optimizer.params.lr") if _number(lr) else None


def _replicas(values: Mapping[str, Any]) -> Found:
    if _get(values, "topology", "dp_shard") in (None, -1, "auto"):
        return 1, "dp_shard fills up"
    return None


_RESOLVERS: dict[str, Callable[[Mapping[str, Any]], Found]] = {
    TRAIN: _by_arithmetic,
    MICRO: _by_arithmetic,
    ACCUMULATION: _by_arithmetic,
    "fp16.enabled": _enabled("fp16"),
    "bf16.enabled": _enabled("bf16"),
    "scheduler.params.warmup_max_lr": _max_lr,
    "scheduler.params.warmup_min_lr": lambda values: (0.0, "the warm-up starts at 0"),
    "communication_data_type": lambda values: (DEFAULT, "that of the precision"),
    "topology.dp_shard": lambda values: (-1, "fills up"),
    "topology.dp_replicate": _replicas,
}

_ADVICE = {
    TRAIN: "the samples of one update",
    MICRO: "the samples of one forward on one rank",
    ACCUMULATION: "the micro-steps of one update",
    "gradient_clipping": "1.0 (DeepSpeed's default) or 0 (off)",
    "optimizer.params.lr": "a number, for example 3e-4",
    "optimizer.params.betas": "two numbers, for example [0.9, 0.999]",
    "optimizer.params.eps": "a number, for example 1e-8",
    "optimizer.params.weight_decay": "a number, for example 0.01",
    "scheduler.params.warmup_max_lr": "a number, or a number as optimizer.params.lr",
    "scheduler.params.warmup_num_steps": "a number of updates",
    "scheduler.params.total_num_steps": "a number of updates",
}
