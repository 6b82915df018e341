"""The accelerator xpu on an Intel GPU; skipped where there is none."""

import pytest

from polyscale.testing.real_device import check_real_device, check_training
from polyscale_xpu.accelerator import XpuAccelerator

pytestmark = pytest.mark.gpu


@pytest.fixture
def xpu():
    made = XpuAccelerator()
    if not made.is_available():
        pytest.skip(made.why_unavailable())
    return made


def test_every_method_and_every_declared_capability_works(xpu):
    check_real_device(xpu)


def test_training_follows_float64_on_the_cpu(xpu):
    check_training(xpu.name)
