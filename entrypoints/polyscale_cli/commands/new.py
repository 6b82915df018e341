"""``scale new``: options and help; the work is in ``polyscale_cli.scaffold``."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from polyscale_cli.commands.group import HELP, Commands

app = typer.Typer(
    cls=Commands,
    help="Write the package of a new plugin: code that works, tests that pass, to be changed.\n\n"
    "Examples: scale new accelerator acme; scale new optimizer signum --output ./signum",
    no_args_is_help=True,
    rich_markup_mode=None,
    context_settings=HELP,
)
_NAME = Annotated[str, typer.Argument(metavar="NAME", help="What configurations will call it.")]
_OUTPUT = Annotated[
    Path | None,
    typer.Option("--output", "-o", metavar="DIR", help="Folder to make; default: NAME-polyscale.", show_default=False),
]


@app.command(context_settings=HELP)
def accelerator(
    name: _NAME,
    output: _OUTPUT = None,
    device_type: Annotated[
        str | None,
        typer.Option(
            "--device-type",
            metavar="TYPE",
            help="Torch's name of the device, as in torch.device(TYPE); default: a simulated device, called NAME.",
            show_default=False,
        ),
    ] = None,
) -> int:
    """Write the package of an accelerator.

    Without --device-type it runs at once, on the simulated device of polyscale-backend-sim, which computes on the CPU.

    Examples: scale new accelerator acme; scale new accelerator acme --device-type xyz --output ~/src/acme
    """
    from polyscale_cli.scaffold.plugins import write_accelerator

    names, folder = write_accelerator(name, device=device_type, folder=output)
    return _say("accelerator", names.name, folder)


@app.command(context_settings=HELP)
def optimizer(name: _NAME, output: _OUTPUT = None) -> int:
    """Write the package of an optimizer.

    Example: scale new optimizer signum
    """
    return _write("optimizer", name, output)


@app.command(context_settings=HELP)
def observer(name: _NAME, output: _OUTPUT = None) -> int:
    """Write the package of an observer, which is told of every update and checkpoint.

    Example: scale new observer ledger
    """
    return _write("observer", name, output)


@app.command(context_settings=HELP)
def io(name: _NAME, output: _OUTPUT = None) -> int:
    """Write the package of an I/O backend, which moves bytes between tensors and files.

    Example: scale new io plain
    """
    return _write("io", name, output)


@app.command(context_settings=HELP)
def op(name: _NAME, output: _OUTPUT = None) -> int:
    """Write the package of an operator, with a reference in PyTorch and a kernel for the CPU in C++.

    Example: scale new op add_scaled_rows
    """
    return _write("op", name, output)


def _write(kind: str, name: str, output: Path | None) -> int:
    from polyscale_cli.scaffold.plugins import write_plugin

    names, folder = write_plugin(kind, name, folder=output)
    return _say(kind, names.name, folder)


def _say(kind: str, name: str, folder: Path) -> int:
    plain = folder.is_absolute() or folder.parts[:1] == ("..",)
    shown = shlex.quote(str(folder) if plain else f"./{folder}")
    print(f"Wrote {shown}. Next:")
    print(f"  pip install {shown}")
    print(f"  scale build {name}" if kind == "op" else f"  scale-report --require {kind}={name}")
    print(f"  python -m pytest {shown}/tests")
    return 0
