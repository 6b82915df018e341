"""Does a checkpoint belong to this model? Names and shapes are compared before anything is touched.

Notable: tied names count as one parameter. A name is found through any of its ties, so a model whose tied weight goes
by its other name, or that no longer ties it, still loads; one that ties what the checkpoint holds apart does not,
because one of the two would be lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from polyscale.checkpoint.manifest import Manifest
from polyscale.errors import CheckpointError

if TYPE_CHECKING:
    from polyscale.parameters.info import ParamInfo

_SHOWN = 10


def compare_parameters(manifest: Manifest, infos: Mapping[str, ParamInfo] | Iterable[ParamInfo]) -> dict[str, str]:
    """Match the parameters of a model with those of a checkpoint.

    Args:
        manifest: of the checkpoint.
        infos: the model's parameters (``store.infos`` or its values); dtypes may differ.

    Returns:
        The model's canonical name -> the name under which the checkpoint holds it.

    Raises:
        CheckpointError: some are missing, unexpected, mis-shaped, or tied here and apart there; the first ten of each
            are named, all are counted.
    """
    model = {info.fqn: info for info in (infos.values() if isinstance(infos, Mapping) else infos)}
    held = {name: fqn for fqn, entry in manifest.parameters.items() for name in (fqn, *entry.tied_to)}
    wanted = {name for info in model.values() for name in info.names}
    sources = {fqn: _sources(info, held) for fqn, info in model.items()}
    shapes = {fqn: entry.shape for fqn, entry in manifest.parameters.items()}
    missing = [fqn for fqn, found in sources.items() if not found]
    apart = [f"{fqn} ({', '.join(found)})" for fqn, found in sources.items() if len(found) > 1]
    unexpected = [fqn for fqn, entry in manifest.parameters.items() if not wanted.intersection((fqn, *entry.tied_to))]
    misshaped = [
        f"{fqn} {list(shapes[found[0]])} instead of {list(model[fqn].shape)}"
        for fqn, found in sources.items()
        if found and shapes[found[0]] != tuple(model[fqn].shape)
    ]
    findings = (
        ("missing", missing),
        ("unexpected", unexpected),
        ("of another shape", misshaped),
        ("tied here but apart there", apart),
    )
    if any(names for _, names in findings):
        raise CheckpointError(
            "The checkpoint is of another model",
            why="; ".join(_listed(what, names) for what, names in findings if names),
            fix="Build the model that was saved, or load the checkpoint that belongs to this one",
        )
    return {fqn: found[0] for fqn, found in sources.items()}


def _sources(info: ParamInfo, held: Mapping[str, str]) -> list[str]:
    return list(dict.fromkeys(held[name] for name in info.names if name in held))


def _listed(what: str, names: list[str]) -> str:
    more = ", ..." if len(names) > _SHOWN else ""
    return f"{len(names)} {what}: {', '.join(names[:_SHOWN])}{more}"
