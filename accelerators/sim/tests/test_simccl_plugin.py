"""The plugin simccl before and after its device is registered, and the groups that torch makes of it."""

import os
import subprocess
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist

from polyscale.discovery import load
from polyscale.errors import UnsupportedError
from polyscale.testing import RanksFailed, ranks, ranks_once

DEVICE = "sim"


def test_before_the_device_is_registered_it_is_available_and_refuses_other_devices():
    code = (
        "import sys; from polyscale.discovery import load; made = load('communication', 'simccl'); "
        "print(made.name, made.is_available(), made.why_unavailable() == '', sorted(made.sums)[0])\n"
        "try:\n    made.backend('cpu')\n"
        "except Exception as error:\n    print(type(error).__name__, error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    first, second = done.stdout.strip().splitlines()
    assert first == "simccl True True bf16"
    assert second.startswith("UnsupportedError")
    assert '"accelerator": "sim"' in second


def strings():
    simccl = load("communication", "simccl")
    with pytest.raises(UnsupportedError, match="It moves tensors of sim"):
        simccl.backend("cpu")
    return simccl.is_available(), simccl.backend(DEVICE)


def test_registered_it_serves_the_device_and_gloo_the_host():
    assert ranks(1, accelerator="sim").run(strings) == [(True, "cpu:gloo,sim:simccl")]


def groups():
    found = []
    for backend in ("simccl", "gloo", "sim:simccl"):
        group = dist.new_group(backend=backend)
        place = "cpu" if backend == "gloo" else DEVICE
        tensor = torch.ones(2, device=place)
        dist.all_reduce(tensor, group=group)
        found.append(tensor.tolist())
        dist.destroy_process_group(group)
    return found


def test_groups_of_their_own_backend():
    assert ranks(2, accelerator="sim").run(groups) == [[[2.0, 2.0]] * 3] * 2


def bound_to_a_device(backend):
    from polyscale_sim import device

    device.register(DEVICE)
    rank = int(os.environ["RANK"])
    place = torch.device(DEVICE, rank)
    torch.accelerator.set_device_index(rank)
    dist.init_process_group(backend, device_id=place if backend else None)
    tensor = torch.ones(2, device=place)
    dist.all_reduce(tensor)
    dist.barrier()
    print(tensor.tolist(), dist.get_backend(torch.distributed.group.WORLD))
    dist.destroy_process_group()


@pytest.mark.parametrize("backend", ["simccl", "cpu:gloo,sim:simccl"])
def test_a_default_group_bound_to_a_device(backend):
    for outcome in ranks_once(2, bound_to_a_device, backend):
        assert outcome.returncode == 0, outcome.stderr
        assert outcome.stdout.startswith("[2.0, 2.0]")


def ends_while_its_thread_waits():
    """Rank 0 ends while rank 1, whose exception ends it, is in the middle of the interpreter's own end."""
    from polyscale_sim import device

    device.register(DEVICE)
    rank = int(os.environ["RANK"])
    torch.accelerator.set_device_index(rank)
    dist.init_process_group("simccl")
    dist.all_reduce(torch.ones(2, device=torch.device(DEVICE, rank)))
    if rank == 0:
        time.sleep(1.0)
        os._exit(0)
    dist.all_reduce(torch.ones(2, device=torch.device(DEVICE, rank)), async_op=True)
    sys.modules["late"] = SlowToGo()  # deleted after exit handlers have run
    raise KeyError("the user's own mistake")


class SlowToGo:
    def __del__(self):
        time.sleep(2.0)


def test_a_process_ends_with_its_own_exit_code_while_a_collective_waits():
    _, failed = ranks_once(2, ends_while_its_thread_waits)
    assert failed.returncode == 1, failed
    assert "the user's own mistake" in failed.stderr


def threads():
    group = dist.new_group()
    dist.all_reduce(torch.ones(1, device=DEVICE), async_op=True).wait()
    dist.all_reduce(torch.ones(1, device=DEVICE), group=group, async_op=True).wait()
    dist.recv(torch.ones(1, device=DEVICE), 1) if dist.get_rank() == 0 else dist.send(torch.ones(1, device=DEVICE), 0)
    return sum(thread.name == "simccl" for thread in threading.enumerate())


def test_threads_end_with_their_groups():
    pool = ranks(2, accelerator="sim")
    counts = [max(pool.run(threads)) for _ in range(4)]
    assert counts[-1] <= counts[0], counts


def dies():
    dist.all_reduce(torch.ones(1, device=DEVICE))
    if dist.get_rank() == 1:
        os._exit(3)
    dist.all_reduce(torch.ones(1, device=DEVICE))


def test_a_rank_that_dies_is_an_error_of_the_others_collective():
    with pytest.raises(RanksFailed) as caught:
        ranks(2, accelerator="sim").run(dies)
    first, second = caught.value.failures
    assert second.exit_code == 3
    assert "onnection" in str(first.exception)
