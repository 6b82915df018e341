"""``scale config check``: what is wrong with a configuration, all at once.

Notable: a configuration may be meant for another machine, so plugins need to be installed, not usable here. Plugins
are loaded (and torch imported) only for what they alone can judge: keys that need one, and the optimizer's parameters.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from polyscale.config import Config, load_config
from polyscale.config.check import Problem, check
from polyscale.config.errors import NotBuiltError
from polyscale.discovery import installed, load
from polyscale.discovery.loading import find
from polyscale.errors import PolyscaleError
from polyscale.kinds import KINDS
from polyscale_cli.boundary import OK, USER_ERROR

_KINDS = {
    "accelerator": "accelerator",
    "communication": "communication",
    "data_parallel": "parallelism",
    "precision": "precision",
    "io": "io",
    "checkpoint": "checkpoint",
}


def run_check(source: str, nproc: int | None = None) -> int:
    """Print errors on stderr and notes on stdout; returns 2 when there is an error.

    Args:
        source: a path, or JSON text.
        nproc: data-parallel ranks on which the batch numbers must multiply; None: not checked.
    """
    if nproc is not None and nproc < 1:
        raise PolyscaleError(f"--nproc {nproc}", why="there must be at least one rank", fix="Give 1 or more")
    problems = find_problems(source, nproc)
    for problem in problems:
        if problem.kind == "error":
            print(f"Error: {problem.text}", file=sys.stderr)
        else:
            print(f"Note: {problem.text}")
    if any(problem.kind == "error" for problem in problems):
        return USER_ERROR
    shown = "The configuration" if source.lstrip().startswith("{") else source
    print(f"{shown} can be used.")
    return OK


def find_problems(source: str, nproc: int | None = None) -> list[Problem]:
    """All that can be said about ``source`` on this machine: errors first, then notes."""
    plugins = frozenset(entry.name for kind in KINDS for entry in installed(kind))
    problems = check(source, plugins=plugins, dp_world=nproc)
    if any(isinstance(problem.error, NotBuiltError) for problem in problems) and (keys := _honoured(source)):
        problems = check(source, honoured=keys, plugins=plugins, dp_world=nproc)
    if any(problem.kind == "error" for problem in problems):
        return problems
    return _plugin_problems(load_config(source)) + problems


def data_parallel(config: Config) -> str:
    """Name of the data-parallel plugin: as configured, else ddp at stage 0, else zero where installed, else fsdp2."""
    if config.backends.data_parallel != "auto":
        return config.backends.data_parallel
    if config.zero_optimization.stage == 0:
        return "ddp"
    return "zero" if any(entry.name == "zero" for entry in installed("parallelism")) else "fsdp2"


def _honoured(source: str) -> frozenset[str]:
    """Keys that the data-parallel plugin of ``source`` honours; none where that cannot be found out."""
    try:
        plugin: Any = load("parallelism", data_parallel(load_config(source)))
    except PolyscaleError:
        return frozenset()
    return frozenset(plugin.honours)


def _plugin_problems(config: Config) -> list[Problem]:
    checks: list[tuple[str, Callable[[], object]]] = []
    for key, kind in _KINDS.items():
        name = getattr(config.backends, key)
        if name != "auto":
            checks.append((f"backends.{key}", lambda kind=kind, name=name: find(kind, name)))  # type: ignore[misc]
    if config.optimizer is not None:
        checks.append(("optimizer", lambda: _check_optimizer(config)))
    return [problem for key, call in checks if (problem := _problem(key, call)) is not None]


def _problem(key: str, call: Callable[[], object]) -> Problem | None:
    try:
        call()
    except PolyscaleError as error:
        return Problem("error", key, f"{key}: {error}", error)
    return None


def _check_optimizer(config: Config) -> None:
    from polyscale.engine.optimizer import load_factory

    if config.optimizer is not None:
        load_factory(config, None).check(dict(config.optimizer.params))
