"""Late work: every forgotten wait reads NaN, every right wait the right numbers."""

import pytest
import torch

from polyscale_sim import device as sim_device
from polyscale_sim import faults

pytestmark = pytest.mark.usefixtures("on_sim")

RIGHT = [0, 1, 2, 3]


def pinned():
    return torch.arange(4.0).pin_memory()


def stream(index=0):
    return torch.Stream(device=torch.device("sim", index))


def here():
    return torch.accelerator.current_stream(0)


def all_nan(tensor):
    return bool(tensor.isnan().all())


def to_device_late(side, source=None):
    """A device tensor that a copy on ``side`` fills."""
    faults.late()
    target = torch.zeros(4, device="sim")
    side.wait_stream(here())
    with side:
        target.copy_(pinned() if source is None else source, non_blocking=True)
    return target


def test_without_lateness_everything_is_there_at_once():
    side, target = stream(), torch.zeros(4, device="sim")
    with side:
        target.copy_(pinned(), non_blocking=True)
    assert (target * 1).tolist() == RIGHT
    assert target.to("cpu", non_blocking=True).tolist() == RIGHT


def test_a_forgotten_wait_for_a_copy_to_the_device_is_nan():
    side = stream()
    target = to_device_late(side)
    assert all_nan(target + 1)
    assert all_nan(target)
    assert all_nan(target.cpu())


def wait_stream(side, event):
    here().wait_stream(side)


def wait_event(side, event):
    here().wait_event(event)


def event_wait(side, event):
    event.wait(here())


def through_a_third(side, event):
    third = stream()
    third.wait_event(event)
    here().wait_stream(third)


def stream_synchronize(side, event):
    side.synchronize()


def event_synchronize(side, event):
    event.synchronize()


def device_synchronize(side, event):
    torch.accelerator.synchronize()


def module_synchronize(side, event):
    torch.sim.synchronize()


def poll(side, event):
    while not event.query():
        pass


WAITS = [
    wait_stream, wait_event, event_wait, through_a_third,
    stream_synchronize, event_synchronize, device_synchronize, module_synchronize, poll,
]  # fmt: skip


@pytest.mark.parametrize("wait", WAITS)
def test_every_right_wait_gives_the_right_numbers(wait):
    side = stream()
    target = to_device_late(side)
    wait(side, side.record_event())
    assert (target + 1).tolist() == [1, 2, 3, 4]
    assert target.tolist() == RIGHT


@pytest.mark.parametrize("wait", [wait_event, event_synchronize, poll])
def test_an_event_recorded_before_the_copy_is_no_wait(wait):
    faults.late()
    side = stream()
    early = side.record_event()
    target = to_device_late(side)
    wait(side, early)
    assert all_nan(target + 1)


def test_a_later_operator_of_the_same_stream_needs_no_wait():
    side = stream()
    target = to_device_late(side)
    with side:
        assert (target + 1).tolist() == [1, 2, 3, 4]


def test_waiting_for_another_stream_is_no_wait():
    side, other = stream(), stream()
    target = to_device_late(side)
    here().wait_stream(other)
    other.synchronize()
    assert all_nan(target + 1)


def test_a_wait_of_another_stream_is_no_wait_of_this_one():
    side, other = stream(), stream()
    target = to_device_late(side)
    other.wait_stream(side)
    assert all_nan(target + 1)
    with other:
        assert target.tolist() == RIGHT


def test_a_source_that_the_host_overwrites_too_early_is_a_wrong_number():
    side, source = stream(), pinned()
    target = to_device_late(side, source)
    source.fill_(9)
    here().wait_stream(side)
    assert target.tolist() == [9, 9, 9, 9]
    source = pinned()
    target = to_device_late(side, source)
    side.synchronize()
    source.fill_(9)
    assert target.tolist() == RIGHT


def test_a_blocking_copy_waits_for_its_stream_only():
    side = stream()
    target = to_device_late(side)
    with side:
        torch.ones(2, device="sim").cpu()
    assert target.tolist() == RIGHT
    target = to_device_late(side)
    torch.ones(2, device="sim").cpu()
    assert all_nan(target)


def test_memory_that_is_not_pinned_is_copied_at_once():
    side = stream()
    target = to_device_late(side, torch.arange(4.0))
    assert target.tolist() == RIGHT


def test_a_copy_to_the_host_is_nan_until_the_host_waits():
    faults.late()
    source = torch.arange(4.0, device="sim")
    for wait in (stream_synchronize, event_synchronize, device_synchronize, poll):
        host = source.to("cpu", non_blocking=True)
        assert all_nan(host)
        (source * 2).sum()  # a later operator does not show the host anything
        assert all_nan(host)
        wait(here(), here().record_event())
        assert host.tolist() == RIGHT
    host = source.to("cpu", non_blocking=True)
    source.sum().item()
    assert host.tolist() == RIGHT


def test_a_wait_of_a_stream_is_no_wait_of_the_host():
    faults.late()
    side, source = stream(), torch.arange(4.0, device="sim")
    host = torch.empty(4).pin_memory()
    side.wait_stream(here())
    with side:
        host.copy_(source, non_blocking=True)
    here().wait_stream(side)
    source.mul(1)
    assert all_nan(host)
    here().synchronize()
    assert host.tolist() == RIGHT


def test_a_copy_to_the_host_reads_what_is_there_when_it_is_its_turn():
    faults.late()
    side, source = stream(), torch.arange(4.0, device="sim")
    host = source.to("cpu", non_blocking=True)
    source.fill_(9)  # the same stream: behind the copy
    here().synchronize()
    assert host.tolist() == RIGHT
    source.copy_(pinned())
    side.wait_stream(here())
    with side:
        host = source.to("cpu", non_blocking=True)
    source.fill_(9)  # another stream that did not wait: the copy reads this
    side.synchronize()
    assert host.tolist() == [9, 9, 9, 9]


def test_a_source_that_is_freed_lives_as_long_as_its_own_stream_needs_it():
    faults.late()
    side = stream()
    host = torch.arange(4.0, device="sim").to("cpu", non_blocking=True)  # freed on the stream of the copy
    here().synchronize()
    assert host.tolist() == RIGHT
    for recorded in (True, False):
        source = torch.arange(4.0, device="sim")
        side.wait_stream(here())
        with side:
            host = source.to("cpu", non_blocking=True)
        if recorded:
            source.record_stream(side)
        del source
        side.synchronize()
        assert (host.tolist() == RIGHT) if recorded else all_nan(host)


def test_a_copy_between_devices_is_late_too():
    faults.late()
    side, source = stream(), torch.arange(4.0, device="sim")
    target = torch.zeros(4, device="sim")
    side.wait_stream(here())
    with side:
        target.copy_(source, non_blocking=True)
    assert all_nan(target + 0)
    here().wait_stream(side)
    assert target.tolist() == RIGHT
    there = source.to("sim:1", non_blocking=True)
    other = stream(1)
    with other:
        assert all_nan(there + 0)
    assert (there + 0).tolist() == RIGHT


def test_a_round_trip_through_pinned_memory_on_one_stream_is_right():
    faults.late()
    host, back = torch.empty(4).pin_memory(), torch.zeros(4, device="sim")
    host.copy_(torch.arange(4.0, device="sim"), non_blocking=True)
    back.copy_(host, non_blocking=True)
    assert (back + 0).tolist() == RIGHT


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16, torch.complex64])
def test_every_floating_dtype_and_stride_is_nan_in_between(dtype):
    faults.late()
    side = stream()
    source = torch.arange(12.0).to(dtype).view(3, 4).pin_memory()
    target = torch.zeros(4, 3, dtype=dtype, device="sim").t()
    side.wait_stream(here())
    with side:
        target[1:].copy_(source[1:], non_blocking=True)
    assert all_nan(target[1:] * 1)
    assert not target[0].isnan().any()
    here().wait_stream(side)
    assert torch.equal(target[1:].cpu(), source[1:])


def test_integers_are_minus_one_in_between():
    faults.late()
    side = stream()
    target = torch.zeros(4, dtype=torch.long, device="sim")
    side.wait_stream(here())
    with side:
        target.copy_(torch.arange(4).pin_memory(), non_blocking=True)
    assert (target + 0).tolist() == [-1, -1, -1, -1]


def test_a_destination_that_is_freed_or_resized_takes_its_write_with_it():
    side = stream()
    base = torch.accelerator.memory_allocated(0)
    target = to_device_late(side)
    assert torch.accelerator.memory_allocated(0) == base + 16
    target.untyped_storage().resize_(0)
    target.untyped_storage().resize_(16)
    target.fill_(5)
    del target
    assert torch.accelerator.memory_allocated(0) == base
    target = to_device_late(side)
    target.untyped_storage().resize_(0)
    target.untyped_storage().resize_(32)
    target.fill_(5)
    side.synchronize()
    assert target.tolist() == [5, 5, 5, 5]


def test_turning_lateness_off_delivers():
    side = stream()
    target = to_device_late(side)
    assert faults.is_late()
    faults.late(False)
    assert target.tolist() == RIGHT


def test_a_late_write_of_a_collective_is_seen_behind_its_stream():
    side, target = stream(), torch.zeros(4, device="sim")
    sim_device.late_write(target, torch.arange(4.0), side)
    assert target.tolist() == RIGHT
    faults.late()
    sim_device.late_write(target, torch.arange(4.0) + 1, side)
    assert all_nan(sim_device.cpu_view(target))
    done = side.record_event()
    here().wait_event(done)
    assert sim_device.cpu_view(target).tolist() == [1, 2, 3, 4]


def test_backward_runs_on_the_streams_of_forward():
    faults.late()
    side, x = stream(), torch.ones(4, device="sim", requires_grad=True)
    side.wait_stream(here())
    with torch.sim.stream(side):
        weight = torch.zeros(4, device="sim")
        weight.copy_(pinned(), non_blocking=True)
        loss = (x * weight).sum()
    here().wait_stream(side)
    loss.backward()
    assert x.grad.tolist() == RIGHT


def test_streams_and_events_of_the_module_wait_for_one_another():
    side, third = torch.sim.Stream(), torch.sim.Stream()
    target = to_device_late(side)
    third.wait_stream(side)
    event = torch.sim.Event()
    event.record(third)
    torch.sim.current_stream().wait_event(event)
    assert (target + 0).tolist() == RIGHT


def test_streams_are_current_in_their_context_only():
    side = torch.sim.Stream()
    assert torch.sim.current_stream() == torch.sim.default_stream() == here()
    with torch.sim.stream(side), torch.sim.stream(side):
        assert torch.sim.current_stream() == side
        with torch.sim.stream(None):
            assert torch.accelerator.current_stream() == side
        elsewhere = torch.sim.Stream(device=2)
        with torch.sim.stream(elsewhere):
            assert torch.sim.current_device() == 2
            assert torch.empty(1, device="sim").device.index == 2
    assert torch.sim.current_device() == 0
    assert torch.sim.current_stream() == torch.sim.default_stream()
    assert side.query()
    start, end = torch.sim.Event(enable_timing=True), torch.sim.Event(enable_timing=True)
    start.record()
    end.record()
    assert start.elapsed_time(end) >= 0
