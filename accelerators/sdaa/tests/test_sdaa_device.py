"""The accelerator sdaa on a Tecorigin device; skipped where there is none."""

import pytest

from polyscale.testing.real_device import check_real_device, check_training
from polyscale_sdaa.accelerator import SdaaAccelerator

pytestmark = pytest.mark.gpu


@pytest.fixture
def sdaa():
    made = SdaaAccelerator()
    if not made.is_available():
        pytest.skip(made.why_unavailable())
    return made


def test_every_method_and_every_declared_capability_works(sdaa):
    check_real_device(sdaa)


def test_training_follows_float64_on_the_cpu(sdaa):
    check_training(sdaa.name)
