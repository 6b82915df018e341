"""The accelerator hpu on a Gaudi device; skipped where there is none."""

import pytest

from polyscale.testing.real_device import check_real_device, check_training
from polyscale_hpu.accelerator import HpuAccelerator

pytestmark = pytest.mark.gpu


@pytest.fixture
def hpu():
    made = HpuAccelerator()
    if not made.is_available():
        pytest.skip(made.why_unavailable())
    return made


def test_every_method_and_every_declared_capability_works(hpu):
    check_real_device(hpu)


def test_training_follows_float64_on_the_cpu(hpu):
    check_training(hpu.name)
