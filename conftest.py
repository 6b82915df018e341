"""Settings of every test run: what the rank pools cost is reported, and no rank is left behind.

Notable: where tests run in several processes (``pytest -n``), each has pools of its own, and tells the first process
what they cost.
"""

import signal
import sys
from dataclasses import asdict
from typing import Any

import pytest

POOLS = pytest.StashKey[list[dict[str, Any]]]()


def pytest_configure(config: pytest.Config) -> None:
    """Make room for what processes tell; let Ctrl-C reach what tests start.

    A shell lets what it starts with ``&`` ignore SIGINT, and so would every program that a test starts and interrupts.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    config.stash[POOLS] = []
    if config.pluginmanager.hasplugin("dsession"):
        config.pluginmanager.register(OfProcesses(config))


class OfProcesses:
    """Takes what the processes tell; apart, since pytest knows this hook only where pytest-xdist hands out tests."""

    def __init__(self, config: pytest.Config) -> None:
        self._told = config.stash[POOLS]

    def pytest_testnodedown(self, node: Any) -> None:
        """Take what a process tells when it ends; one that crashed tells nothing."""
        self._told += getattr(node, "workeroutput", {}).get("pools", [])


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Tell the first process, where this is another."""
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["pools"] = _pools()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say what each pool of ranks cost."""
    for pool in [*_pools(), *terminalreporter.config.stash[POOLS]]:
        terminalreporter.write_line(
            f"pool of {pool['world']} ranks: started in {pool['start_seconds']:.1f} s, "
            f"{pool['cases']} cases, replaced {pool['replaced']} times"
        )


def pytest_unconfigure() -> None:
    """End the pools of ranks."""
    pool = sys.modules.get("polyscale.testing.pool")
    if pool:
        pool.close_pools()


def _pools() -> list[dict[str, Any]]:
    pool = sys.modules.get("polyscale.testing.pool")
    return [asdict(report) for report in pool.pool_reports()] if pool else []
