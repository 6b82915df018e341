"""Ranks that die by SIGKILL or stop: the others are told which one, soon; nothing is left behind."""

import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from shm_ranks import BACKEND, meet, on_new_ranks, only_shm, plugin, raised

from polyscale._torch import all_gather
from polyscale.testing.failures import RanksFailed

SOON_S = 10.0


def tell(**facts):
    """Write facts where the test reads them although another rank is gone."""
    print("FACTS", json.dumps(facts), flush=True)


def told(failed):
    """What each rank told, by rank; {} for one that told nothing."""
    found = []
    for failure in failed.failures:
        lines = [line for line in failure.output.splitlines() if line.startswith("FACTS ")]
        found.append(json.loads(lines[-1].removeprefix("FACTS ")) if lines else {})
    return found


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def gathering():
    all_gather(torch.empty(300_000 * dist.get_world_size()), torch.ones(300_000), None, async_op=False)


def summing():
    dist.all_reduce(torch.ones(300_000))


def summing_little():
    dist.all_reduce(torch.ones(1))


def waiting():
    dist.barrier()


def receiving():
    dist.recv(torch.ones(300_000), dist.get_world_size() - 1)


def broadcasting():
    dist.broadcast(torch.ones(300_000), dist.get_world_size() - 1)


CALLS = {
    gathering: "all_gather",
    summing: "all_reduce",
    summing_little: "all_reduce",
    waiting: "barrier",
    receiving: "recv",
    broadcasting: "broadcast",
}


def one_dies_before(call):
    """The last rank dies while the others wait for it; a further call, and leaving the group, do not wait either."""
    warm = torch.ones(10)
    dist.all_reduce(warm)
    if dist.get_rank() == dist.get_world_size() - 1:
        time.sleep(0.5)
        die()
    began = time.monotonic()
    said = raised(call)
    took = time.monotonic() - began
    began = time.monotonic()
    again = raised(summing_little)
    dist.destroy_process_group()
    tell(said=said, took=took, again=again, further=time.monotonic() - began)


QUICK = (gathering, summing_little)
CASES = [(call, 2) for call in QUICK]
CASES += [pytest.param(call, 2, marks=pytest.mark.long) for call in CALLS if call not in QUICK]
CASES += [pytest.param(call, 4, marks=pytest.mark.long) for call in CALLS]


@pytest.mark.parametrize(("call", "world"), CASES)
def test_a_killed_rank_frees_those_that_wait_for_it(call, world):
    if BACKEND == "gloo" and world > 2:
        pytest.skip("over gloo those that talk to others than the dead rank wait on")
    with pytest.raises(RanksFailed) as caught:
        on_new_ranks(world, one_dies_before, call)
    assert caught.value.exit_codes[-1] == -signal.SIGKILL
    for facts in told(caught.value)[:-1]:
        assert facts, str(caught.value)
        assert facts["took"] < SOON_S and facts["further"] < SOON_S
        assert facts["said"] != "nothing was raised" and facts["again"] != "nothing was raised"
        if BACKEND == "shm":
            assert f"rank {world - 1}" in facts["said"] and CALLS[call] in facts["said"], facts
            assert f"rank {world - 1}" in facts["again"], facts


def one_dies_inside():
    """Rank 1 dies with a collective under way, before rank 0 comes to it."""
    dist.all_reduce(torch.ones(10))
    if dist.get_rank() == 1:
        threading.Timer(0.3, die).start()
        summing()
        time.sleep(20)
    time.sleep(1.0)
    began = time.monotonic()
    said = raised(summing)
    tell(said=said, took=time.monotonic() - began)


def test_a_rank_that_died_inside_a_collective():
    with pytest.raises(RanksFailed) as caught:
        on_new_ranks(2, one_dies_inside)
    facts = told(caught.value)[0]
    assert facts and facts["took"] < SOON_S, str(caught.value)
    assert facts["said"] != "nothing was raised"
    if BACKEND == "shm":
        assert "rank 1" in facts["said"] and "all_reduce" in facts["said"], facts


def one_dies_at_any_moment(after):
    """Collectives without end, of all kinds; rank 1 dies in one of them."""
    if dist.get_rank() == 1:
        threading.Timer(after, die).start()
    said, began = "nothing was raised", time.monotonic()
    while said == "nothing was raised" and time.monotonic() - began < 30:
        for call in (summing, gathering, summing_little, broadcasting):
            said = raised(call)
            if said != "nothing was raised":
                break
    tell(said=said, took=time.monotonic() - began)


@pytest.mark.long
@pytest.mark.parametrize("after", [0.3 + 0.0137 * index for index in range(12)])
def test_a_death_at_any_moment(after):
    with pytest.raises(RanksFailed) as caught:
        on_new_ranks(2, one_dies_at_any_moment, after)
    assert caught.value.exit_codes == (None, -signal.SIGKILL) or caught.value.exit_codes[1] == -signal.SIGKILL
    facts = told(caught.value)[0]
    assert facts and facts["took"] < SOON_S, str(caught.value)
    if BACKEND == "shm":
        assert "rank 1" in facts["said"], facts


def many_works_at_a_death():
    """Works of several groups, none waited for yet when the peer dies: each is an error, none hangs."""
    groups = [dist.new_group([0, 1]) for _ in range(3)]
    dist.all_reduce(torch.ones(1))
    if dist.get_rank() == 1:
        time.sleep(0.3)
        die()
    works = [dist.all_reduce(torch.ones(1000), group=group, async_op=True) for group in groups for _ in range(5)]
    futures = [] if BACKEND == "gloo" else [work.get_future() for work in works]
    began = time.monotonic()
    said = [raised(work.wait) for work in works] + [raised(future.wait) for future in futures]
    tell(said=said, took=time.monotonic() - began)


@pytest.mark.long
def test_every_work_under_way_ends_with_a_death():
    with pytest.raises(RanksFailed) as caught:
        on_new_ranks(2, many_works_at_a_death)
    facts = told(caught.value)[0]
    assert facts and facts["took"] < SOON_S, str(caught.value)
    assert "nothing was raised" not in facts["said"]


def all_die():
    """Use everything, then end by SIGKILL on every rank at once."""
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    buffers = [plugin().allocate(100_000, dtype=torch.float32, device=torch.device("cpu")) for _ in range(3)]
    for group in groups:
        for buffer in buffers:
            dist.all_reduce(buffer.fill_(1), group=group)
    work = dist.all_reduce(torch.ones(1_000_000), async_op=True)
    tell(pid=os.getpid())
    meet("killed")
    if dist.get_rank() == 0:
        time.sleep(0.3)  # the store of the others ends with it
    del work
    die()


def left_behind(pids):
    """Names in /dev/shm, abstract sockets and processes that belong to ``pids``."""
    own = [str(pid) for pid in pids]
    names = [path.name for path in Path("/dev/shm").iterdir()]
    names = [name for name in names if "polyscale" in name or any(pid in name for pid in own)]
    lines = Path("/proc/net/unix").read_text().splitlines()
    sockets = [line for line in lines if any(f"-{pid}" in line for pid in own)]
    return names, sockets, [pid for pid in pids if sessions().get(pid)]


def sessions():
    """Living processes by the session (each rank leads one) that they are in."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if fields[0] not in "ZX":
            found.setdefault(int(fields[3]), []).append(int(path.parent.name))
    return found


def test_nothing_is_left_where_all_ranks_are_killed(tmp_path):
    with pytest.raises(RanksFailed) as caught:
        on_new_ranks(2, all_die, env={"TMPDIR": str(tmp_path)})
    assert caught.value.exit_codes == (-signal.SIGKILL,) * 2
    pids = [facts["pid"] for facts in told(caught.value)]
    assert left_behind(pids) == ([], [], [])
    assert list(tmp_path.iterdir()) == []


def one_stops():
    """Rank 1 is stopped for longer than the group's time-out, and goes on."""
    rank = dist.get_rank()
    dist.all_reduce(torch.ones(10))
    if rank == 1:
        me = os.getpid()
        child = os.fork()
        if child == 0:
            time.sleep(6)
            os.kill(me, signal.SIGCONT)
            os._exit(0)
        os.kill(me, signal.SIGSTOP)
        os.waitpid(child, 0)
    began = time.monotonic()
    said = raised(summing)
    return said, time.monotonic() - began


@pytest.mark.long
def test_a_rank_that_stops_is_a_time_out_that_names_it():
    (said, took), (late, _) = on_new_ranks(2, one_stops, group_timeout=2.0)
    assert took < 6 and said != "nothing was raised"
    assert late != "nothing was raised"
    if BACKEND == "shm":
        assert "rank 1" in said and "all_reduce" in said, said


def killed_as_a_root_of_copies():
    """Rank 1 dies right after its part of a large collective is announced: whoever reads its memory gets an error."""
    from datetime import timedelta

    if dist.get_rank() == 1:
        work = all_gather(torch.empty(16_000_000), torch.ones(8_000_000), None, async_op=True)
        del work
        die()
    output = torch.zeros(16_000_000)
    said = raised(lambda: all_gather(output, torch.ones(8_000_000), None, async_op=True).wait(timedelta(seconds=20)))
    tell(said=said, whole=bool((output == 1).all()))


@pytest.mark.long
@only_shm
def test_memory_of_a_dead_rank_is_an_error_or_was_read_whole():
    with pytest.raises(RanksFailed) as caught:
        on_new_ranks(2, killed_as_a_root_of_copies)
    facts = told(caught.value)[0]
    assert facts, str(caught.value)
    assert facts["whole"] if facts["said"] == "nothing was raised" else "rank 1" in facts["said"], facts
