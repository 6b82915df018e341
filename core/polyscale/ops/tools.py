"""What compiles a module here: the host's compiler, the device's, ninja, pybind11.

Notable: compilers come from accelerators' ``toolchain()``, so no vendor is named here; nothing is run to find them. A
compiler is recognised by its path, size and time, so that a warm start does not ask it for its version.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyscale import env
from polyscale.errors import BuildError, PolyscaleError
from polyscale.interfaces.accelerator import Toolchain
from polyscale.interfaces.op import KernelModule

if TYPE_CHECKING:
    from polyscale.interfaces.accelerator import Accelerator

HOST = "cpu"


class ToolMissingError(BuildError):
    """Nothing is wrong with the module: this machine lacks what compiles it."""


@dataclass(frozen=True)
class Tools:
    """Compilers of one module.

    Attributes:
        host: compiles ``.cpp`` files.
        device: compiles all others, and links; None: the module has no others.
    """

    host: Toolchain
    device: Toolchain | None

    @property
    def linker(self) -> Toolchain:
        """Links the extension."""
        return self.device or self.host

    def identities(self) -> list[list[Any]]:
        """What a build depends on: path, size and time of each compiler, and its flags."""
        return [_identity(each) for each in (self.host, self.device) if each is not None]


def find_tools(module: KernelModule, *, with_device: bool) -> Tools:
    """Compilers for ``module``.

    Args:
        module: what is to be compiled.
        with_device: whether it has sources for the compiler of its device type.

    Raises:
        ToolMissingError: there is no compiler.
    """
    host = _toolchain(module, HOST, "there is no C++ compiler", "Install a C++ compiler (g++ or clang++), or set CXX")
    if not with_device or module.device_type == HOST:
        return Tools(host, None)
    device = module.device_type
    why, fix = f"there is no compiler for {device}", f"Install the toolkit of {device}: scale-report says which"
    return Tools(host, _toolchain(module, device, why, fix))


def available(device_type: str) -> bool:
    """Whether a device of this type can be used here."""
    return any(accelerator.is_available() for accelerator in accelerators(device_type))


def accelerators(device_type: str) -> list[Accelerator]:
    """Installed accelerators of ``device_type``; that of the same name alone where it is the host's."""
    from polyscale.discovery import installed, load

    names = sorted({entry.name for entry in installed("accelerator")}, key=lambda name: (name != device_type, name))
    found = []
    for name in [device_type] if device_type == HOST and HOST in names else names:
        try:
            accelerator = load("accelerator", name)
        except PolyscaleError:
            continue  # scale-report says what is wrong with it
        if accelerator.device_type == device_type:
            found.append(accelerator)
    return found


def pybind11_folder() -> Path | None:
    """Folder of pybind11's headers; None where it is not installed."""
    spec = find_spec("pybind11")
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    return Path(places[0]) / "include" if places else None


def pybind11_version() -> str:
    """Version of pybind11, from metadata; "" where it is not installed."""
    from importlib import metadata

    try:
        return metadata.version("pybind11")
    except metadata.PackageNotFoundError:
        return ""


def _toolchain(module: KernelModule, device_type: str, why: str, fix: str) -> Toolchain:
    """Compiler of the accelerator for ``device_type``; where several have one, that of the device that is here."""
    candidates = accelerators(device_type)
    if not candidates and device_type == HOST and (usual := _usual_compiler()) is not None:
        return usual
    if not candidates:
        from polyscale.discovery.missing import unknown

        raise missing(module, f"no accelerator for {device_type} is installed", unknown("accelerator", device_type).fix)
    found: Toolchain | None = None
    for accelerator in candidates:
        chain = _asked(accelerator)
        if chain is None:
            continue
        if not Path(chain.compiler).is_file():
            why = f"its compiler for {device_type}, {chain.compiler!r}, is no program"
            fix = "Correct the variable that names it (CXX, or the toolkit's), or unset it; it takes no arguments"
            continue
        if device_type == HOST or accelerator.is_available():
            return chain
        found = found or chain
    if found is None:
        raise missing(module, why, fix)
    return found


def _usual_compiler() -> Toolchain | None:
    """The host's compiler where nothing names one: in the environment that pip makes to build a wheel."""
    names = [named] if (named := env.compiler()) else ["c++", "g++", "clang++"]
    path = next(filter(None, map(shutil.which, names)), None)
    return Toolchain(path, flags=("-O3", "-std=c++17", "-fPIC")) if path else None


def _asked(accelerator: Accelerator) -> Toolchain | None:
    try:
        return accelerator.toolchain()
    except Exception:  # a vendor's code: as good as no compiler
        return None


def _identity(chain: Toolchain) -> list[Any]:
    try:
        stat = Path(chain.compiler).resolve().stat()
    except OSError:
        return [chain.compiler, list(chain.flags)]
    return [chain.compiler, list(chain.flags), stat.st_size, stat.st_mtime_ns]


def missing(module: KernelModule, why: str, fix: str) -> ToolMissingError:
    """The error that says what is missing, and how to get it."""
    return ToolMissingError(f"Kernel module {module.name!r} cannot be built", why=why, fix=fix)
