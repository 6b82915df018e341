"""A declared capability works, or the error names plugin, capability and what failed; an undeclared one is refused."""

import pytest
import torch

import polyscale
from polyscale.claims import broken_claims, check_dtype, keep_claim
from polyscale.errors import UnsupportedError
from polyscale.interfaces.accelerator import Capabilities
from polyscale.testing.distributions import write_distribution
from polyscale_cpu.accelerator import CpuAccelerator


class Boastful(CpuAccelerator):
    """A CPU that claims more than it has."""

    name = "boastful"
    capabilities = Capabilities(frozenset({"fp32", "fp8"}), streams=True, pinned_memory=True, memory_statistics=True)

    def new_stream(self):
        raise RuntimeError("no queue 1")

    def memory(self):
        raise NotImplementedError("acme_memory_stats")


def test_claims_that_hold_are_not_broken():
    assert broken_claims(CpuAccelerator()) == []


def test_each_claim_that_does_not_hold_names_plugin_capability_and_failure():
    told = [str(error) for error in broken_claims(Boastful())]
    assert all("Accelerator 'boastful': Its plugin declares" in text for text in told)
    for what in (
        "the dtype fp8, but the names of dtypes are bf16, fp16, fp32, fp64",
        "streams, but work on a new stream failed: RuntimeError: no queue 1",
        "memory statistics, but asking for them failed: NotImplementedError: acme_memory_stats",
    ):
        assert any(what in text for text in told), what
    if not torch.accelerator.is_available():
        assert any("pinned memory, but pinning host memory failed" in text for text in told)


def test_memory_that_is_not_counted_is_found():
    class Blind(Boastful):
        capabilities = Capabilities(frozenset({"fp32"}), memory_statistics=True)

        def memory(self):
            return polyscale.interfaces.accelerator.MemoryUse(0, 0, 0, 1)

    (error,) = broken_claims(Blind())
    assert "a tensor of 1048576 bytes was counted as 0 bytes" in error.why


def test_memory_that_cannot_be_had_is_one_broken_claim_among_the_others():
    class Refusing(Boastful):
        capabilities = Capabilities(frozenset({"fp8"}), memory_statistics=True)

        def memory(self):
            return polyscale.interfaces.accelerator.MemoryUse(0, 0, 0, 1)

        def device(self, index=None):
            return torch.device("xla")  # torch here is built without it

    told = [error.why for error in broken_claims(Refusing())]
    assert len(told) == 2 and "the dtype fp8" in told[0] and "a tensor of 1048576 bytes failed" in told[1]


def test_wrong_products_are_found(monkeypatch):
    real = torch.Tensor.__matmul__
    monkeypatch.setattr(torch.Tensor, "__matmul__", lambda a, b: real(a, b) * (2 if a.dtype == torch.float64 else 1))
    (error,) = broken_claims(CpuAccelerator())
    assert "the dtype fp64, but a product of two matrices of ones gave 8 instead of 4" in error.why


def test_out_of_memory_is_not_taken_for_a_broken_claim():
    def fail():
        raise torch.OutOfMemoryError("full")

    with pytest.raises(torch.OutOfMemoryError):
        keep_claim("acme", "streams", "making a stream", fail)


def test_dtypes_that_nobody_declares_are_refused_with_those_declared():
    with pytest.raises(UnsupportedError) as caught:
        check_dtype(Boastful(), "fp16")
    assert caught.value.given == "Computing in fp16 on accelerator 'boastful'"
    assert caught.value.why == "Its plugin declares fp32, fp8"
    assert "fp32" in caught.value.fix


PLUGIN = """
from polyscale.hooks import hookimpl
from polyscale.interfaces.accelerator import Capabilities
from polyscale_cpu.accelerator import CpuAccelerator

class Narrow(CpuAccelerator):
    name = "narrow"
    capabilities = Capabilities(frozenset({"fp32", "fp64"}), memory_statistics=True)
    def memory(self):
        raise RuntimeError("counter broke")

class Plugin:
    interface_version = (1, 0)
    @hookimpl
    def polyscale_accelerator(self, context):
        return Narrow()
"""


@pytest.fixture
def narrow(tmp_path, monkeypatch):
    entry_points = {"polyscale.accelerator": {"narrow": "acme_narrow:Plugin"}}
    write_distribution(tmp_path, "acme-narrow", entry_points=entry_points, modules={"acme_narrow": PLUGIN})
    monkeypatch.syspath_prepend(str(tmp_path))
    return {"train_micro_batch_size_per_gpu": 1, "backends": {"accelerator": "narrow"}}


def test_a_training_in_a_dtype_that_is_not_declared_is_refused_before_it_starts(narrow):
    model = torch.nn.Linear(2, 2)
    with pytest.raises(UnsupportedError) as caught:
        polyscale.initialize(model, config={**narrow, "bf16": {"enabled": True}})
    assert caught.value.given == "Computing in bf16 on accelerator 'narrow'"
    assert model.weight.dtype == torch.float32
    polyscale.initialize(model, config=narrow).close()


def test_a_training_on_a_plugin_whose_claim_fails_names_it(narrow):
    engine = polyscale.initialize(torch.nn.Linear(2, 2), config=narrow)
    with engine, pytest.raises(UnsupportedError) as caught:
        engine.memory()
    assert caught.value.given == "Accelerator 'narrow'"
    assert "declares memory statistics, but asking for them failed: RuntimeError: counter broke" in caught.value.why
