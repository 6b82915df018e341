"""The accelerator npu on an Ascend NPU; skipped where there is none."""

import pytest

from polyscale.testing.real_device import check_real_device, check_training
from polyscale_npu.accelerator import NpuAccelerator

pytestmark = pytest.mark.gpu


@pytest.fixture
def npu():
    made = NpuAccelerator()
    if not made.is_available():
        pytest.skip(made.why_unavailable())
    return made


def test_every_method_and_every_declared_capability_works(npu):
    check_real_device(npu)


def test_training_follows_float64_on_the_cpu(npu):
    check_training(npu.name)
