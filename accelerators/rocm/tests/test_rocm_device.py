"""The accelerator rocm on an AMD device; skipped where there is none."""

import pytest

from polyscale.testing.real_device import check_real_device, check_training
from polyscale_rocm.accelerator import RocmAccelerator

pytestmark = pytest.mark.gpu


@pytest.fixture
def rocm():
    made = RocmAccelerator()
    if not made.is_available():
        pytest.skip(made.why_unavailable())
    return made


def test_every_method_and_every_declared_capability_works(rocm):
    check_real_device(rocm)


def test_training_follows_float64_on_the_cpu(rocm):
    check_training(rocm.name)
