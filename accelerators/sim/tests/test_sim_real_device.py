"""The checks that vendors' devices must pass, on the simulated one; and what they make of one that boasts."""

from dataclasses import replace

import pytest

from polyscale import ops
from polyscale.claims import broken_claims
from polyscale.interfaces.accelerator import Capabilities, MemoryUse
from polyscale.testing.alone import alone
from polyscale.testing.real_device import check_real_device, check_training
from polyscale_sim import faults
from polyscale_sim.accelerator import SimAccelerator
from polyscale_sim.device import MODULE

if ops.status(MODULE).state == "cannot build":
    pytest.skip("the extension cannot be built here", allow_module_level=True)


def everything():
    check_real_device(SimAccelerator())
    check_training("sim")


def test_a_device_that_does_what_it_declares_passes():
    alone(everything)


class Whole(SimAccelerator):
    """Has an allocator that takes all of the device at once."""

    def memory(self):
        use = super().memory()
        return replace(use, reserved=use.total)


def whole():
    check_real_device(Whole())


def test_an_allocator_may_reserve_the_whole_device():
    alone(whole)


class Lying(SimAccelerator):
    """Counts nothing, and claims a dtype that torch has no such name for."""

    capabilities = Capabilities(frozenset({"fp32", "fp4"}), memory_statistics=True, pinned_memory=True)

    def memory(self):
        return MemoryUse(0, 0, 0, 1)


class Forgetful(SimAccelerator):
    """Loses the random state that it is given back."""

    def set_rng_state(self, state):
        self.manual_seed(99)


def lies():
    lying = Lying()
    lying.activate()
    lying.set_device(0)
    return [error.why for error in broken_claims(lying)]


def test_claims_that_do_not_hold_are_each_named():
    dtype, memory = alone(lies)
    assert "declares the dtype fp4, but the names of dtypes are" in dtype
    assert "declares memory statistics, but a tensor of 1048576 bytes was counted as 0 bytes" in memory


class Boundless(SimAccelerator):
    """Takes any index."""

    def set_device(self, index):
        super().set_device(index % self.device_count())


class Peakless(SimAccelerator):
    """Says that the peak is what is held now."""

    def memory(self):
        use = super().memory()
        return replace(use, peak=use.allocated)


class Deaf:
    """A stream, or an event, that does not wait."""

    def __init__(self, real):
        self.real = real
        self.__dict__.update({name: getattr(real, name) for name in ("record", "synchronize") if hasattr(real, name)})

    def __enter__(self):
        return self.real.__enter__()

    def __exit__(self, *exc):
        return self.real.__exit__(*exc)

    def wait_stream(self, other):
        pass


class Hasty(SimAccelerator):
    """Has streams that wait for no other."""

    def new_stream(self):
        return Deaf(super().new_stream())


class Unready(SimAccelerator):
    """Has events that do not wait."""

    def new_event(self):
        made = Deaf(super().new_event())
        made.synchronize = lambda: None
        return made


class Mute(SimAccelerator):
    """Counts wrongly in the report."""

    def diagnose(self):
        return [replace(row, value="none") for row in super().diagnose()]


WRONG = (Forgetful, Boundless, Peakless, Hasty, Unready, Mute)


def noticed():
    SimAccelerator().activate()
    faults.late()  # so that what was not waited for is NaN
    check_real_device(SimAccelerator())
    found = []
    for kind in WRONG:
        try:
            check_real_device(kind())
        except AssertionError:
            found.append(kind.__name__)
    return found


def test_each_wrong_device_is_noticed():
    assert alone(noticed) == [kind.__name__ for kind in WRONG]
