"""manifest.json: what a checkpoint holds besides tensors, readable by people and by later versions.

Notable: written last, so a directory without it is a save that was not finished. ``format`` is a number that grows when
an older polyscale could no longer read what is written; everything else may gain keys, which older versions ignore.
Imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyscale import __version__
from polyscale.checkpoint.durable import write_bytes
from polyscale.checkpoint.faults import failure
from polyscale.checkpoint.names import MANIFEST
from polyscale.checkpoint.values import decode, encode
from polyscale.errors import CheckpointError

if TYPE_CHECKING:
    from polyscale.parameters.info import ParamInfo

FORMAT = 1


@dataclass(frozen=True)
class ParameterEntry:
    """One parameter: its full shape, the dtype of its master ("float32"), its other names."""

    shape: tuple[int, ...]
    dtype: str
    tied_to: tuple[str, ...] = ()


@dataclass(frozen=True)
class Manifest:
    """The content of manifest.json. ``optimizer``, ``scheduler``, ``scaler``, ``counters`` and ``has`` hold what
    ``polyscale.checkpoint.values`` can encode.

    Attributes:
        world_size: ranks that saved it.
        stage: ZeRO stage that saved it.
        data_parallel: data-parallel plugin that saved it.
        tensors: names in ``tensors/``.
        parameters: canonical name -> entry.
        optimizer: class, groups by parameter name, hyper-parameters, scalar states per parameter; None without one.
        scheduler: state of the LR scheduler; None without one.
        scaler: state of the loss scaler; None without one.
        classes: of which kind "scheduler" and "scaler" are; their states fit no other.
        counters: steps, micro-steps, samples.
        has: which further parts there are ("rng", "data", "client_state", names of tracked objects).
        format: version of the layout.
        polyscale: version that wrote it.
    """

    world_size: int
    stage: int
    data_parallel: str
    tensors: tuple[str, ...] = ()
    parameters: dict[str, ParameterEntry] = field(default_factory=dict)
    optimizer: dict[str, Any] | None = None
    scheduler: Any = None
    scaler: Any = None
    classes: dict[str, str] = field(default_factory=dict)
    counters: dict[str, int] = field(default_factory=dict)
    has: dict[str, Any] = field(default_factory=dict)
    format: int = FORMAT
    polyscale: str = __version__


def parameter_entries(infos: Iterable[ParamInfo]) -> dict[str, ParameterEntry]:
    """Describe parameters as a manifest does."""
    return {
        info.fqn: ParameterEntry(tuple(info.shape), str(info.dtype).removeprefix("torch."), tuple(info.tied_to))
        for info in infos
    }


def encode_manifest(manifest: Manifest) -> bytes:
    """The content of manifest.json.

    Raises:
        CheckpointError: it holds a value that JSON cannot; its place is named.
    """
    content: dict[str, Any] = {"format": manifest.format, "polyscale": manifest.polyscale}
    for entry in fields(Manifest):
        value = getattr(manifest, entry.name)
        if entry.name == "tensors":
            content["tensors"] = list(value)
        elif entry.name == "parameters":
            content["parameters"] = {name: _parameter_to_json(item) for name, item in value.items()}
        else:
            content[entry.name] = encode(value, f"manifest.{entry.name}")
    return (json.dumps(content, indent=1, allow_nan=False) + "\n").encode()


def write_manifest(directory: str | PathLike[str], manifest: Manifest) -> None:
    """Write manifest.json into ``directory`` and fsync it. One rank, after everything else is written.

    Raises:
        CheckpointError: it holds a value that JSON cannot (its place is named), or the system refuses.
    """
    path = Path(directory, MANIFEST)
    try:
        write_bytes(path, encode_manifest(manifest))
    except OSError as error:
        raise failure(path, "written", error) from error


def read_manifest(directory: str | PathLike[str]) -> Manifest:
    """Read the manifest of the checkpoint in ``directory``.

    Raises:
        CheckpointError: it is missing, no JSON, not complete, or of a newer format (says which version reads it).
    """
    path = Path(directory, MANIFEST)
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise failure(path, "read", error) from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read", why=f"it is no JSON: {error}", fix=_OTHER) from error
    if not isinstance(content, Mapping) or not isinstance(content.get("format"), int):
        raise CheckpointError(f"{path} cannot be read", why="it names no format", fix=_OTHER)
    _check_format(path, content)
    try:
        return _from_json(content)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        why = f"'{error.args[0]}' is missing" if isinstance(error, KeyError) else str(error)
        raise CheckpointError(f"{path} cannot be read", why=why, fix=_OTHER) from error


_OTHER = "The file was changed or damaged: load another checkpoint"


def _check_format(path: Path, content: Mapping[str, Any]) -> None:
    if content["format"] <= FORMAT:
        return
    writer = str(content.get("polyscale", "")) or "a newer version"
    raise CheckpointError(
        f"{path} is of format {content['format']}",
        why=f"polyscale {writer} wrote it, and polyscale {__version__} reads formats up to {FORMAT}",
        fix=f"Upgrade: pip install 'polyscale-core>={writer}'" if writer[:1].isdecimal() else "Upgrade polyscale",
    )


def _from_json(content: Mapping[str, Any]) -> Manifest:
    known = {entry.name for entry in fields(Manifest)}
    values = {name: decode(value) for name, value in content.items() if name in known}
    for name, kind in _KINDS.items():
        _require(values, name, kind)
    if values.get("optimizer") is not None:
        _check_optimizer(values["optimizer"])
    for name in values["counters"]:
        _require(values["counters"], name, int)
    values.setdefault("classes", {})
    _require(values, "classes", dict)
    values["tensors"] = tuple(values["tensors"])
    values["parameters"] = {name: _parameter_from_json(item) for name, item in values["parameters"].items()}
    return Manifest(**values)


_KINDS: dict[str, type] = {
    "world_size": int,
    "stage": int,
    "data_parallel": str,
    "tensors": list,
    "parameters": dict,
    "counters": dict,
    "has": dict,
}


def _check_optimizer(saved: Any) -> None:
    for name, kind in (("class", str), ("groups", list), ("states", dict)):
        _require(saved, name, kind)
    for group in saved["groups"]:
        _require(group, "names", list)
        _require(group, "options", dict)
    for state in saved["states"].values():
        _require(state, "tensors", dict)
        _require(state, "scalars", dict)


def _require(values: Any, name: str, kind: type) -> None:
    if not isinstance(values[name], kind):
        raise ValueError(f"'{name}' is {values[name]!r}")


def _parameter_to_json(entry: ParameterEntry) -> dict[str, Any]:
    return {"shape": list(entry.shape), "dtype": entry.dtype, "tied_to": list(entry.tied_to)}


def _parameter_from_json(item: dict[str, Any]) -> ParameterEntry:
    return ParameterEntry(tuple(int(size) for size in item["shape"]), str(item["dtype"]), tuple(item["tied_to"]))
