"""What is written for each kind of plugin: which templates, filled in with what."""

from __future__ import annotations

from pathlib import Path

import polyscale
from polyscale.kinds import KINDS
from polyscale_cli.scaffold.devices import DeviceType, check_free, device_type
from polyscale_cli.scaffold.names import Names, checked_names
from polyscale_cli.scaffold.writing import render, write

_DESCRIPTIONS = {
    "accelerator": "{name} devices as a polyscale accelerator.",
    "optimizer": "The optimizer {name} for polyscale.",
    "observer": "The observer {name} for polyscale.",
    "io": "The I/O backend {name} for polyscale.",
    "op": "The operator {name} for polyscale, with a kernel.",
}
_CORE = {"op": "polyscale-core[build]"}


def write_plugin(kind: str, name: str, *, folder: Path | None = None) -> tuple[Names, Path]:
    """Write the folder of a new plugin that is no accelerator; returns its names and the folder.

    Args:
        kind: "optimizer", "observer", "io" or "op".
        name: what configurations will call it.
        folder: where to write; None: named after the distribution, in the current folder.

    Raises:
        PolyscaleError: the name or the folder cannot be taken.
    """
    names = checked_names(kind, name)
    return names, _write(names, ("common", kind), _values(names), folder)


def write_accelerator(name: str, *, device: str | None = None, folder: Path | None = None) -> tuple[Names, Path]:
    """Write the folder of a new accelerator; returns its names and the folder.

    Args:
        name: what configurations will call it.
        device: device type that torch has, or that a package brings; None: a simulated device under ``name``.
        folder: where to write; None: named after the distribution, in the current folder.

    Raises:
        PolyscaleError: the name, the device type or the folder cannot be taken.
    """
    names = checked_names("accelerator", name)
    if device is None:
        check_free(name)
        values = {**_values(names, "polyscale-standard", "polyscale-backend-sim"), "device_type": name}
        device_type(name)  # it becomes one
        return names, _write(names, ("common", "accelerator", "simulated"), values, folder)
    found = device_type(device)
    if name != device:
        check_free(name)
    values = {**_values(names, "polyscale-standard"), **_device_values(found)}
    return names, _write(names, ("common", "accelerator", "known"), values, folder)


def _write(names: Names, layers: tuple[str, ...], values: dict[str, str], folder: Path | None) -> Path:
    place = Path(names.distribution) if folder is None else folder
    write(place, render(layers, values))
    return place


def _values(names: Names, *further: str) -> dict[str, str]:
    core = _CORE.get(names.kind, "polyscale-core")
    release = ".".join(polyscale.__version__.split(".")[:2])
    return {
        "kind": names.kind,
        "name": names.name,
        "distribution": names.distribution,
        "package": names.package,
        "camel": names.camel,
        "upper": names.name.upper(),
        "interface": repr(KINDS[names.kind].version),
        "description": _DESCRIPTIONS[names.kind].format(name=names.name),
        "dependencies": ", ".join(f'"{each}>={release}"' for each in (core, *further)),
    }


def _device_values(device: DeviceType) -> dict[str, str]:
    """The lines of the class that depend on what torch knows."""
    if device.has_module:
        modules = "    modules: tuple[str, ...] = ()  # packages that activate() imports\n"
    else:
        modules = f'    modules = ("torch_{device.name}",)  # the package that brings torch.{device.name}\n'
    if not device.known:
        modules += "    private = True  # it takes torch's one slot for out-of-tree devices (PrivateUse1)\n"
    return {"device_type": device.name, "communication": device.communication, "modules": modules}
