"""Stand-ins of absent devices: what is recorded and refused, and that no wrong accelerator passes over one."""

import pytest

from polyscale.interfaces.accelerator import Capabilities
from polyscale.testing.alone import alone
from polyscale.testing.device_checks import check_every_method
from polyscale.testing.signatures import Record, exported_names, read_record, signatures
from polyscale.testing.stand_in import StandIn
from polyscale.torch_accelerator import TorchAccelerator

SOURCE = """
__all__ = ["memory_allocated", "Stream", "hidden"]

def memory_allocated(device: int | None = None, *, unit: str = "B") -> int: ...
def _private(): ...
def other(a, /, b, *args, c=1, **kwargs): ...

class Stream(Base):
    def __new__(cls, device=None, priority: int = 0, **kwargs): ...
    def wait_stream(self, stream: "Stream") -> None: ...
    def __enter__(self): ...
    def _inner(self): ...
    @property
    def handle(self): ...
    @classmethod
    def of(cls, handle): ...
"""
STREAM = {"Stream": "(device=None, priority=0, **kwargs)", "Stream.wait_stream": "(stream)", "Stream.__enter__": "()"}
NAMES = {
    "is_available": "()", "device_count": "()", "current_device": "()", "set_device": "(device)", "synchronize": "()",
    "memory_allocated": "(device=None)", "memory_reserved": "(device=None)", "max_memory_allocated": "(device=None)",
    "reset_peak_memory_stats": "(device=None)", "mem_get_info": "(device=None)", "get_device_name": "(device=None)",
    "manual_seed": "(seed)", "get_rng_state": "(device='acme')", "set_rng_state": "(new_state, device='acme')",
}  # fmt: skip
RECORD = Record("torch.acme", "1.0", "made up", NAMES)


def test_signatures_are_read_from_the_syntax_tree():
    assert signatures([SOURCE]) == {
        **STREAM,
        "memory_allocated": "(device=None, *, unit='B')",
        "other": "(a, /, b, *args, c=1, **kwargs)",
    }
    assert set(signatures([SOURCE], exported=exported_names(SOURCE))) == {"memory_allocated", *STREAM}
    later = "def memory_allocated(): ..."
    assert signatures([SOURCE, later])["memory_allocated"] == "()"


def test_a_record_is_read_as_it_was_written(tmp_path):
    RECORD.write(tmp_path / "record.json")
    assert read_record(tmp_path / "record.json") == RECORD
    kept = Record("m", "1", "s", {**STREAM, "stream": "(stream)"}).without("Stream")
    assert set(kept.names) == {"stream"}


def test_a_stand_in_has_the_recorded_names_and_signatures_and_no_others():
    fake = StandIn(RECORD)
    public = {name for name in vars(fake.module) if not name.startswith("__")}
    assert public == set(NAMES)
    assert fake.module.memory_allocated() == fake.module.memory_allocated(device=1) == 0
    with pytest.raises(TypeError, match="unexpected keyword argument 'index'"):
        fake.module.memory_allocated(index=1)
    with pytest.raises(TypeError, match="takes 0 positional arguments but 1 was given"):
        fake.module.synchronize(0)
    with pytest.raises(AssertionError, match="Invalid device id 2"):
        fake.module.set_device(2)
    with pytest.raises(NotImplementedError, match="does nothing when new_thing is called"):
        StandIn(Record("torch.acme", "1", "", {"new_thing": "()"})).module.new_thing()


class Acme(TorchAccelerator):
    name = device_type = "acme"
    private = True
    capabilities = Capabilities(frozenset({"fp32"}), memory_statistics=True)


class WrongDevice(Acme):
    def set_device(self, index):
        self._check_index(index)


class WrongPeak(Acme):
    def reset_peak_memory(self):
        pass


class WrongState(Acme):
    def set_rng_state(self, state):
        pass


class WrongIndex(Acme):
    def _check_index(self, index):
        pass


class Silent(Acme):
    def synchronize(self):
        pass


def passes(accelerator):
    fake = StandIn(RECORD)
    fake.install()
    try:
        check_every_method(accelerator(), fake)
    except AssertionError:
        return False
    return True


def judged():
    return {kind.__name__: passes(kind) for kind in (Acme, WrongDevice, WrongPeak, WrongState, WrongIndex, Silent)}


def test_only_the_right_accelerator_passes_over_it():
    assert [name for name, passed in alone(judged).items() if passed] == ["Acme"]
