"""Calling every method of an accelerator over a stand-in, and seeing that each reached the device's module."""

from __future__ import annotations

from typing import TYPE_CHECKING

from polyscale.errors import UnsupportedError
from polyscale.interfaces.accelerator import Accelerator, Toolchain

if TYPE_CHECKING:
    from polyscale.testing.stand_in import StandIn


def check_every_method(accelerator: Accelerator, fake: StandIn) -> None:
    """Fail where a method of the Protocol does not do on ``fake`` what it is for.

    Args:
        accelerator: over the device type of ``fake``, which is installed.
        fake: has at least two devices.
    """
    assert accelerator.capabilities.dtypes  # before isinstance, which takes an AttributeError in it for its absence
    assert isinstance(accelerator, Accelerator)
    why = accelerator.why_unavailable()
    assert not why, why
    assert accelerator.is_available()
    accelerator.activate()
    accelerator.activate()
    _check_devices(accelerator, fake)
    _check_memory(accelerator, fake)
    _check_random_numbers(accelerator)
    _check_streams(accelerator, fake)
    rows = {row.name: row for row in accelerator.diagnose()}
    assert rows["devices"].value == f"{fake.devices}: " + ", ".join(f"Stand-in {i}" for i in range(fake.devices))
    compiler = accelerator.toolchain()
    assert compiler is None or isinstance(compiler, Toolchain)


def _check_devices(accelerator: Accelerator, fake: StandIn) -> None:
    import torch

    count = fake.devices
    assert accelerator.device_count() == count
    assert accelerator.device(1) == torch.device(accelerator.device_type, 1)
    accelerator.set_device(1)
    assert fake.index == 1
    assert accelerator.device() == torch.device(accelerator.device_type, 1)
    for index in (count, -1):
        try:
            accelerator.set_device(index)
        except UnsupportedError as error:
            assert f"{count} devices are visible" in error.why, error.why
        else:
            raise AssertionError(f"device {index} of {count} was accepted")
    accelerator.synchronize()
    assert "synchronize" in fake.called()


def _check_memory(accelerator: Accelerator, fake: StandIn) -> None:
    if not accelerator.capabilities.memory_statistics:
        return
    fake.hold(300)
    fake.hold(-100)
    use = accelerator.memory()
    assert (use.allocated, use.reserved, use.peak) == (200, 400, 300), use
    assert use.total > use.reserved
    accelerator.reset_peak_memory()
    assert accelerator.memory().peak == 200
    accelerator.empty_cache()
    assert hasattr(fake.module, "empty_cache") == ("empty_cache" in fake.called())


def _check_random_numbers(accelerator: Accelerator) -> None:
    import torch

    accelerator.manual_seed(3)
    saved = accelerator.rng_state()
    assert (saved.dtype, saved.device.type) == (torch.uint8, "cpu")
    accelerator.manual_seed(4)
    assert not torch.equal(accelerator.rng_state(), saved)
    accelerator.set_rng_state(saved)
    assert torch.equal(accelerator.rng_state(), saved)


def _check_streams(accelerator: Accelerator, fake: StandIn) -> None:
    stream, other, event = accelerator.new_stream(), accelerator.new_stream(), accelerator.new_event()
    with stream:
        event.record()
        event.record(stream)
    other.wait_stream(stream)
    event.synchronize()
    other.synchronize()
    assert ("Stream.__init__" in fake.called()) == accelerator.capabilities.streams
