"""Driver, devices and compiler of the host. Nothing here raises or touches a device."""

from __future__ import annotations

import re

from polyscale.device_host import compiler_row, files, find_compiler, tool_output
from polyscale.discovery.requirements import version_of
from polyscale.interfaces.accelerator import Finding, Toolchain

# Device files and tools: http://docs.tecorigin.com/release/software_installation and .../tecosmi
_CARDS = "/dev/tcaicard[0-9]*"
DEVICES_OF_A_CARD = 4
_USUAL_FOLDER = "/opt/tecoai/bin"
_FLAGS = ("-O3", "-fPIC")


def physical_devices() -> int:
    """Devices of this host or container: a card is four."""
    return DEVICES_OF_A_CARD * len(files(_CARDS))


def toolchain() -> Toolchain | None:
    """``tecocc`` of the toolkit, which its ``setvars.sh`` puts on the path."""
    return find_compiler("tecocc", [_USUAL_FOLDER], _FLAGS)


def findings(compiler: Toolchain | None) -> list[Finding]:
    """Rows of the report: driver, the plugin of torch, compiler."""
    said = re.search(r"SDAADriver:\s*([\w.]+)", tool_output(["teco-smi"]))
    driver = said[1] if said else "unknown version" if physical_devices() else "none"
    plugin = version_of("torch-sdaa")
    return [
        Finding("driver", driver, ok=driver != "none", fix="" if driver != "none" else "Install TecoDriver"),
        Finding("torch-sdaa", plugin or "none", ok=plugin is not None),
        compiler_row("tecocc", compiler, "install TecoToolKit, and run `source /opt/tecoai/setvars.sh`"),
    ]
