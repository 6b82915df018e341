"""``scale config check``: what is wrong with a configuration, all at once.

Notable: a configuration may be meant for another machine, so plugins need to be installed, not usable here. Plugins
are loaded (and torch imported) only for what they alone can judge: keys that need one, and the optimizer's parameters.
What is wrong is taken out, so that the rest is checked on.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from polyscale.config import Config
from polyscale.config.check import Problem, as_problems, notes, review
from polyscale.config.errors import NotBuiltError
from polyscale.config.hyper_parameters import wrong_hyper_parameters
from polyscale.config.load import examine
from polyscale.discovery import installed, load
from polyscale.discovery.loading import find
from polyscale.errors import PolyscaleError
from polyscale.kinds import KINDS
from polyscale_cli.boundary import OK, USER_ERROR
from polyscale_cli.commands.config_source import named, read_source

_KINDS = {
    "accelerator": "accelerator",
    "communication": "communication",
    "data_parallel": "parallelism",
    "precision": "precision",
    "io": "io",
    "checkpoint": "checkpoint",
}


def run_check(source: str, nproc: int | None = None, *, own_optimizer: bool = False) -> int:
    """Print errors on stderr and notes on stdout, a line each; returns 2 when there is an error.

    Args:
        source: a path, JSON text, or "-" for stdin.
        nproc: data-parallel ranks on which the batch numbers must multiply; None: not checked.
        own_optimizer: whether an optimizer is passed to ``initialize``, so that none need be configured.
    """
    if nproc is not None and nproc < 1:
        raise PolyscaleError(f"--nproc {nproc}", why="there must be at least one rank", fix="Give 1 or more")
    problems = find_problems(source, nproc, own_optimizer=own_optimizer)
    for problem in problems:
        text = " ".join(problem.text.split())
        if problem.kind == "error":
            print(f"Error: {text}", file=sys.stderr)
        else:
            print(f"Note: {text}")
    if any(problem.kind == "error" for problem in problems):
        return USER_ERROR
    print(f"{named(source)} can be used.")
    return OK


def find_problems(source: str, nproc: int | None = None, *, own_optimizer: bool = False) -> list[Problem]:
    """All that can be said about ``source`` on this machine: errors first, then notes."""
    try:
        config, errors = examine(read_source(source))
    except PolyscaleError as error:
        return as_problems([error])
    plugins = frozenset(entry.name for kind in KINDS for entry in installed(kind))
    honoured: frozenset[str] = frozenset()
    problems = review(config, errors, plugins=plugins, dp_world=nproc, own_optimizer=own_optimizer)
    if any(isinstance(problem.error, NotBuiltError) for problem in problems) and (honoured := _honoured(config)):
        problems = review(
            config, errors, honoured=honoured, plugins=plugins, dp_world=nproc, own_optimizer=own_optimizer
        )
    told = {problem.key for problem in problems}
    problems += [problem for problem in _plugin_problems(config, told) if problem.key not in told]
    return problems + notes(config, honoured)


def data_parallel(config: Config) -> str:
    """Name of the data-parallel plugin: as configured, else ddp at stage 0, else zero where installed, else fsdp2."""
    if config.backends.data_parallel != "auto":
        return config.backends.data_parallel
    if config.zero_optimization.stage == 0:
        return "ddp"
    return "zero" if any(entry.name == "zero" for entry in installed("parallelism")) else "fsdp2"


def _honoured(config: Config) -> frozenset[str]:
    """Keys that the data-parallel plugin of ``config`` honours; none where that cannot be found out."""
    try:
        plugin: Any = load("parallelism", data_parallel(config))
    except PolyscaleError:
        return frozenset()
    return frozenset(plugin.honours)


def _plugin_problems(config: Config, told: Iterable[str]) -> list[Problem]:
    problems = []
    for key, kind in _KINDS.items():
        name = getattr(config.backends, key)
        if name != "auto":
            problems += _named_problem(f"backends.{key}", kind, name)
    if config.optimizer is not None and "optimizer.type" not in told:
        problems += _optimizer_problems(config)
    return problems


def _named_problem(key: str, kind: str, name: str) -> list[Problem]:
    try:
        find(kind, name)
    except PolyscaleError as error:
        return [Problem("error", key, f"{key}: {error}", error)]
    return []


def _optimizer_problems(config: Config) -> list[Problem]:
    from polyscale.engine.optimizer import load_factory

    assert config.optimizer is not None
    try:
        factory = load_factory(config, None)
    except PolyscaleError as error:
        return [Problem("error", "optimizer.type", f"optimizer.type: {error}", error)]
    return as_problems(wrong_hyper_parameters(config.optimizer, factory))
