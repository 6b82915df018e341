"""Tests that use the fixture ``on_sim`` run in a process in which the device is registered, not in pytest's own.

A device cannot be unregistered, and ``torch.accelerator`` would tell the tests of other members that there is one.
"""

from __future__ import annotations

import os

import pytest

from polyscale.testing import ranks
from polyscale_sim import faults
from polyscale_sim.accelerator import SimAccelerator


@pytest.fixture
def on_sim() -> None:
    """Run the test on the simulated device; without one, skip, except where tests must be complete."""
    why = SimAccelerator().why_unavailable()
    if why and os.environ.get("CI") == "true":
        pytest.fail(why)
    if why:
        pytest.skip(why)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Ship the test function to a rank."""
    if "on_sim" not in pyfuncitem.fixturenames:
        return None
    names = [name for name in pyfuncitem._fixtureinfo.argnames if name != "on_sim"]
    values = [pyfuncitem.funcargs[name] for name in names]
    ranks(1, accelerator="sim").run(_on_device, pyfuncitem.obj, *values)
    return True


def _on_device(test, *values):
    faults.reset()
    try:
        test(*values)
    finally:
        faults.reset()
