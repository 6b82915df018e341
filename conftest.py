"""Settings of every test run: what the rank pools cost is reported, and no rank is left behind."""

import sys

import pytest


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say what each pool of ranks cost."""
    pool = sys.modules.get("polyscale.testing.pool")
    for report in pool.pool_reports() if pool else ():
        terminalreporter.write_line(
            f"pool of {report.world} ranks: started in {report.start_seconds:.1f} s, "
            f"{report.cases} cases, replaced {report.replaced} times"
        )


def pytest_unconfigure() -> None:
    """End the pools of ranks."""
    pool = sys.modules.get("polyscale.testing.pool")
    if pool:
        pool.close_pools()
