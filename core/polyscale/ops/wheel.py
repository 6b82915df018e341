"""Wheels of packages with kernel modules: the extensions compiled for this machine are put into them.

Notable: any build backend can do it. One in the package's own tree (PEP 517, ``backend-path``) has another build a pure
wheel, and calls ``with_extensions``. Where there is no compiler, or pip is given ``-C prebuilt=no``, the wheel stays
pure and its modules are built at first use. An editable install is always so.
"""

from __future__ import annotations

import base64
import configparser
import hashlib
import json
import logging
import sys
import zipfile
from collections.abc import Mapping
from dataclasses import asdict, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from polyscale.hooks import PluginContext
from polyscale.interfaces.op import KernelModule
from polyscale.ops.loading import ensure_built
from polyscale.ops.recipe import extension_file
from polyscale.ops.tools import ToolMissingError

logger = logging.getLogger("polyscale")
_OPTION = "prebuilt"
_GROUP = "polyscale.op"


def with_extensions(name: str, wheel_directory: str, config_settings: Mapping[str, Any] | None = None) -> str:
    """Compile the modules of the project in the current folder into its wheel; returns the wheel's name.

    A PEP 517 backend calls it at the end of its ``build_wheel``, in which the current folder is the project's. Modules
    that have a ``prebuilt`` folder are compiled into that.

    Args:
        name: the pure wheel that has just been built; it is replaced.
        wheel_directory: where it is.
        config_settings: ``{"prebuilt": "no"}`` leaves extensions out.

    Raises:
        BuildError: a source does not compile.
    """
    pure = Path(wheel_directory) / name
    if str((config_settings or {}).get(_OPTION, "yes")).lower() in ("no", "0", "false"):
        return name
    try:
        libraries = _libraries(pure)
        added = _extensions(_import_root(Path.cwd(), libraries), libraries)
    except ToolMissingError as error:
        logger.warning("%s %s has no extension: it is built at first use.", error, name)
        return name
    return _with_files(pure, added).name if added else name


def _libraries(wheel: Path) -> dict[str, str]:
    """Op libraries that a wheel declares: name -> ``module:class``."""
    parser = configparser.ConfigParser(delimiters=("=",))
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.endswith(".dist-info/entry_points.txt"):
                parser.read_string(archive.read(name).decode())
    return dict(parser[_GROUP]) if parser.has_section(_GROUP) else {}


def _import_root(project: Path, libraries: Mapping[str, str]) -> Path:
    """The folder from which the project's packages are imported: its own, or ``src`` in it."""
    for value in libraries.values():
        package = value.partition(":")[0].partition(".")[0]
        if not (project / package).is_dir() and (project / "src" / package).is_dir():
            return project / "src"
    return project


def _extensions(root: Path, libraries: Mapping[str, str]) -> dict[str, bytes]:
    """Build what belongs into the wheel; returns name in the wheel -> content.

    Raises:
        ToolMissingError: there is nothing to compile it with.
        BuildError: a source does not compile.
    """
    added: dict[str, bytes] = {}
    for module in _modules(root, libraries):
        if module.prebuilt is None:
            continue
        built = ensure_built(module)
        place = module.prebuilt.resolve().relative_to(root.resolve()).as_posix()
        record = replace(built.record, file=extension_file(module))
        added[f"{place}/{record.file}"] = built.path.read_bytes()
        added[f"{place}/{module.name}.json"] = json.dumps(asdict(record), indent=1).encode() + b"\n"
    return added


def _modules(root: Path, libraries: Mapping[str, str]) -> list[KernelModule]:
    sys.path.insert(0, str(root))
    try:
        found: list[KernelModule] = []
        for name, value in libraries.items():
            package, _, attribute = value.partition(":")
            plugin = getattr(import_module(package), attribute)()
            found += plugin.polyscale_op(context=PluginContext(name=name)).modules()
        return found
    finally:
        sys.path.remove(str(root))


def _with_files(pure: Path, added: Mapping[str, bytes]) -> Path:
    """Replace a pure wheel by one for this Python and platform that has ``added`` too; returns it."""
    tag = _tag()
    name, version = pure.name.split("-")[:2]
    target = pure.with_name(f"{name}-{version}-{tag}.whl")
    with zipfile.ZipFile(pure) as old, zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as new:
        record = next(each for each in old.infolist() if each.filename.endswith(".dist-info/RECORD"))
        contents = {each.filename: old.read(each) for each in old.infolist() if each is not record}
        contents = {file: _retagged(file, data, tag) for file, data in contents.items()}
        lines = []
        for file, data in {**added, **contents}.items():  # the metadata last, as the format recommends
            new.writestr(_entry(file, record), data)
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            lines.append(f"{file},sha256={digest},{len(data)}\n")
        new.writestr(_entry(record.filename, record), "".join([*lines, f"{record.filename},,\n"]))
    pure.unlink()
    return target


def _entry(name: str, like: zipfile.ZipInfo) -> zipfile.ZipInfo:
    """An entry with the time and rights of another: the same files give the same wheel."""
    entry = zipfile.ZipInfo(name, like.date_time)
    entry.compress_type, entry.external_attr = zipfile.ZIP_DEFLATED, like.external_attr
    return entry


def _retagged(file: str, data: bytes, tag: str) -> bytes:
    if not file.endswith(".dist-info/WHEEL"):
        return data
    kept = [line for line in data.decode().splitlines() if not line.startswith(("Root-Is-Purelib:", "Tag:"))]
    return "\n".join([*filter(None, kept), "Root-Is-Purelib: false", f"Tag: {tag}", ""]).encode()


def _tag() -> str:
    """The tag of this Python on this platform; not one of those that promise an older C library."""
    from packaging.tags import sys_tags

    return str(next(tag for tag in sys_tags() if not tag.platform.startswith(("manylinux", "musllinux"))))
