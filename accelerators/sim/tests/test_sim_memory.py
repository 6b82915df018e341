"""Memory of the simulated device: exact bytes, limits, failing allocations, storages that are resized."""

import gc

import pytest
import torch

from polyscale_sim import faults

pytestmark = pytest.mark.usefixtures("on_sim")


def used(device=0):
    return torch.accelerator.memory_allocated(device)


def test_bytes_are_those_asked_for_on_each_device():
    before = [used(i) for i in range(4)]
    held = [torch.empty(1000 + i, dtype=torch.uint8, device=f"sim:{i}") for i in range(4)]
    assert [used(i) - before[i] for i in range(4)] == [1000, 1001, 1002, 1003]
    assert torch.sim.memory_allocated(3) == used(3) == torch.sim.memory_reserved("sim:3")
    assert torch.accelerator.memory_reserved(2) == used(2)
    del held
    assert [used(i) for i in range(4)] == before


def test_peak_is_the_most_at_a_time_and_can_be_reset():
    base = used()
    torch.accelerator.reset_peak_memory_stats(0)
    first = torch.empty(1 << 20, dtype=torch.uint8, device="sim")
    second = torch.empty(1 << 20, dtype=torch.uint8, device="sim")
    del first
    third = torch.empty(1 << 18, dtype=torch.uint8, device="sim")
    assert torch.accelerator.max_memory_allocated(0) == torch.sim.max_memory_allocated() == base + (2 << 20)
    assert torch.sim.max_memory_reserved() == base + (2 << 20)
    torch.sim.reset_peak_memory_stats()
    assert torch.sim.max_memory_allocated() == used() == base + (1 << 20) + (1 << 18)
    del second, third


def test_results_of_operators_count_once_and_views_do_not():
    x = torch.ones(64, 64, device="sim")
    base = used()
    y = x @ x
    assert used() - base == y.nbytes
    z = (x.t()[2:], x.view(-1), x.unsqueeze(0).expand(5, 64, 64), x.detach())
    normal = torch.nn.functional.layer_norm(x, (64,))  # a CPU kernel makes this result
    assert used() - base == y.nbytes + normal.nbytes
    chunks = torch.stack([x, x]).unbind(0)
    assert used() - base == y.nbytes + normal.nbytes + 2 * x.nbytes
    del chunks, y, z, normal
    assert used() == base


def test_temporary_memory_of_an_operator_counts_for_the_peak():
    x = torch.randn(1 << 16, device="sim")
    base = used()
    torch.sim.reset_peak_memory_stats()
    x.sort()
    assert used() == base
    assert torch.sim.max_memory_allocated() - base >= x.nbytes + x.numel() * 8


def test_counters_add_up():
    stats = torch.accelerator.memory_stats(1)
    held = [torch.empty(100, device="sim:1") for _ in range(5)]
    later = torch.accelerator.memory_stats(1)
    assert later["allocation.all.current"] - stats["allocation.all.current"] == 5
    assert later["allocated_bytes.all.allocated"] - stats["allocated_bytes.all.allocated"] == 2000
    del held
    torch.accelerator.reset_accumulated_memory_stats(1)
    assert torch.sim.memory_stats(1)["allocated_bytes.all.freed"] == 0


def test_beyond_the_limit_is_out_of_memory_and_the_device_goes_on():
    faults.memory_limit(used() + (1 << 20))
    free, total = torch.sim.mem_get_info()
    assert free == 1 << 20
    assert total == used() + free
    held = torch.empty(1 << 19, dtype=torch.uint8, device="sim")
    base = used()
    for ask in (1 << 20, (1 << 19) + 1):
        with pytest.raises(torch.OutOfMemoryError, match=rf"sim:0 is out of memory: tried to allocate {ask} bytes"):
            torch.empty(ask, dtype=torch.uint8, device="sim")
    assert used() == base
    rest = torch.zeros(1 << 19, dtype=torch.uint8, device="sim")
    assert torch.sim.mem_get_info()[0] == 0
    assert not rest.cpu().any()
    del rest, held


def test_an_operator_that_runs_out_of_memory_leaves_its_operands():
    x = torch.randn(256, 256, device="sim")
    copy = x.cpu()
    faults.memory_limit(used() + 1000)
    for operator in (lambda: x @ x, lambda: torch.nn.functional.layer_norm(x, (256,)), lambda: x.sort(), x.clone):
        base = used()
        with pytest.raises(torch.OutOfMemoryError):
            operator()
        assert used() == base
    faults.memory_limit(1 << 30)
    assert torch.equal(x.cpu(), copy)
    assert torch.equal((x @ x).cpu(), copy @ copy)


@pytest.mark.parametrize("k", [1, 2, 5])
def test_the_kth_allocation_fails_and_only_that_one(k):
    faults.fail_allocation(k)
    made, failed = [], []
    for attempt in range(1, 8):
        try:
            made.append(torch.empty(10, device="sim"))
        except torch.OutOfMemoryError as error:
            failed.append((attempt, "told to fail" in str(error)))
    assert failed == [(k, True)]
    torch.empty(10, device="sim:1")


def test_failing_allocations_are_those_of_one_device():
    faults.fail_allocation(1, device=2)
    torch.empty(10, device="sim")
    with pytest.raises(torch.OutOfMemoryError, match="sim:2"):
        torch.empty(10, device="sim:2")


def test_a_storage_that_is_resized_frees_its_bytes_and_keeps_its_tensors():
    x = torch.arange(1000, dtype=torch.float32, device="sim")
    view, base = x[10:20], used()
    x.untyped_storage().resize_(0)
    assert used() == base - 4000
    x.untyped_storage().resize_(4000)
    assert used() == base
    x.copy_(torch.arange(1000, dtype=torch.float32))
    assert view.tolist() == list(range(10, 20))
    x.untyped_storage().resize_(8000)
    assert used() == base + 4000
    assert view.tolist() == list(range(10, 20))


def test_tensors_are_resized_in_place_and_as_results():
    x = torch.arange(6.0, device="sim")
    x.resize_(2, 5)
    assert x.flatten()[:6].tolist() == [0, 1, 2, 3, 4, 5]
    out = torch.empty(0, device="sim")
    base = used()
    torch.sort(torch.tensor([3.0, 1.0, 2.0], device="sim"), out=(out, torch.empty(0, dtype=torch.long, device="sim")))
    assert out.tolist() == [1, 2, 3]
    assert used() == base + out.nbytes
    torch.add(torch.ones(3, device="sim"), 1, out=out)
    assert out.tolist() == [2, 2, 2]


def test_all_memory_comes_back_after_training():
    gc.collect()
    base = used()
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.LayerNorm(64), torch.nn.Linear(64, 8)).to("sim")
    optimizer = torch.optim.AdamW(model.parameters())
    bytes_of_parameters = sum(p.nbytes for p in model.parameters())
    for _ in range(3):
        model(torch.randn(16, 32, device="sim")).square().sum().backward()
        optimizer.step()
    steps = sum(state["step"].nbytes for state in optimizer.state.values() if state["step"].device.type == "sim")
    assert used() - base == 4 * bytes_of_parameters + steps
    del model, optimizer
    gc.collect()
    assert used() == base
