"""What the watchdog is made of, without ranks: bookkeeping, places, processes, the log."""

import dataclasses
import json
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from polyscale.control import pieces
from polyscale.control.agreement import Control
from polyscale.control.events import Event, Log, is_communication_error, is_timeout, of_exception
from polyscale.control.explanations import seconds_waited
from polyscale.control.peers import Peers
from polyscale.control.places import Phase, Place, line_of_exception
from polyscale.control.processes import is_gone, this_process
from polyscale.control.waits import Seen, WaitClock, hopeless
from polyscale.errors import RankError


def event(kind, rank, **fields):
    return Event(kind, rank, **{"host": "h", "place": "a", "pid": 100 + rank, **fields})


def test_a_failure_is_met_by_as_many_failures_of_this_rank():
    peers = Peers(0)
    peers.take([event("here", 1), event("failed", 1, number=1)])
    assert len(peers.pending(0)) == 1
    assert peers.pending(1) == []
    peers.take([event("failed", 1, number=2), event("failed", 0, number=9)])
    assert [one.number for one in peers.pending(1)] == [2]


def test_the_end_of_a_rank_is_met_by_nothing():
    peers = Peers(0)
    peers.take([event("here", 1), event("gone", 1), event("gone", 1)])
    assert len(peers.pending(5)) == 1
    assert peers.here == {}


def test_causes_come_before_consequences():
    peers = Peers(2)
    peers.take([event("failed", 0, number=1, secondary=True), event("gone", 1)])
    assert [one.rank for one in peers.pending(0)] == [1, 0]
    assert [one.rank for one in peers.causes(0)] == [1]


def test_a_rank_that_comes_back_has_not_left():
    peers = Peers(0)
    peers.take([event("here", 1), event("left", 1)])
    assert list(peers.left) == [1]
    peers.take([event("here", 1)])
    assert peers.left == {}
    assert list(peers.here) == [1]


def test_a_rank_that_its_watchdog_ended_has_not_left_of_its_own_accord():
    peers = Peers(0)
    peers.take([event("left", 1, code=75), event("left", 2, step=4, last=True)])
    assert [one.rank for one in peers.departures()] == [2]
    assert "has ended itself (exit code 75)" in str(peers.left[1])
    assert "has left after step 4 without an error" in str(peers.left[2])


def test_the_first_rank_of_each_host_listens_to_the_next_host():
    def heard_by(rank, place):
        places = {0: "a", 1: "a", 2: "b", 3: "b", 4: "c"}
        peers = Peers(rank)
        peers.take([event("here", other, place=where) for other, where in places.items()])
        return [one.rank for one in peers.next_host(place, rank)]

    assert heard_by(0, "a") == [2, 3]
    assert heard_by(1, "a") == []
    assert heard_by(2, "b") == [4]
    assert heard_by(4, "c") == [0, 1]


def test_nobody_listens_where_there_is_one_host():
    peers = Peers(0)
    peers.take([event("here", 1)])
    assert peers.next_host("a", 0) == []


def test_phases_nest_and_remember_where_an_exception_came_from():
    place = Place()
    assert str(place) == "outside the engine (steps done: 0)"
    with pytest.raises(ValueError) as caught, Phase(place, "step"), Phase(place, "backward") as inner:
        inner.note("block.1 reduce_scatter")
        raise ValueError
    assert str(place) == "outside the engine (steps done: 0)"
    assert place.of(caught.value) == "in backward, at block.1 reduce_scatter (steps done: 0)"
    with Phase(place, "step"):
        with Phase(place, "backward"):
            place.detail = "block.2 all_gather"
        assert str(place) == "in step (steps done: 0)"
        assert place.of(caught.value) == "in backward, at block.1 reduce_scatter (steps done: 0)"
        assert place.of(ValueError()) == str(place)


def calls_in(work):
    """(name of the file, name) of every call that ``work`` makes, in order."""
    calls = []

    def note(frame, event, argument):
        if event == "call":
            calls.append((Path(frame.f_code.co_filename).name, frame.f_code.co_name))
        elif event == "c_call" and argument is not sys.setprofile:
            calls.append(("", argument.__name__))

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return calls[1:]


def test_a_phase_writes_attributes_and_reads_the_clock():
    """So it costs microseconds (benchmarks/watchdog.py): no lock, no message, nothing of the store."""
    place = Place()

    def phase():
        with Phase(place, "forward"):
            pass

    enter, leave = [("", "get_ident"), ("", "monotonic")], [("", "monotonic")]
    ours = [("places.py", name) for name in ("__init__", "__enter__", "__exit__")]
    assert calls_in(phase) == [ours[0], ours[1], *enter, ours[2], *leave]


def test_a_note_writes_an_attribute():
    import torch.distributed as dist

    from polyscale.control.watchdog import Watchdog

    watchdog = Watchdog(Control(dist.HashStore(), 0, 1))
    assert calls_in(lambda: watchdog.note("h.3 reduce_scatter")) == [("watchdog.py", "note")]


def test_the_line_of_an_exception_is_the_users_and_not_torchs():
    import torch

    def layer():
        return torch.nn.Linear(2, 2)(torch.ones(3))

    with pytest.raises(RuntimeError) as caught:
        layer()
    line = line_of_exception(caught.value)
    assert "test_watchdog_parts.py" in line
    assert "in layer (module " in line


def test_a_process_is_gone_when_it_has_ended_reaped_or_not():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        identity = type(this_process())("h", "a", child.pid, "")
        assert not is_gone(identity)
        child.kill()
        if sys.platform.startswith("linux"):
            started = this_process().started
            end = time.monotonic() + 5
            while not (dead := is_gone(type(identity)("h", "a", child.pid, started))) and time.monotonic() < end:
                time.sleep(0.01)
            assert dead
        child.wait()
        assert is_gone(identity)
    finally:
        child.kill()
        child.communicate()
    assert not is_gone(this_process())


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="start times are read from /proc")
def test_another_process_of_the_same_number_is_not_the_same():
    me = this_process()
    assert me.started
    assert is_gone(type(me)(me.host, me.place, os.getpid(), str(int(me.started) - 1)))


def test_a_record_that_is_announced_and_not_there_hides_none_and_is_read_when_it_comes():
    import torch.distributed as dist

    store = dist.HashStore()
    writer, reader = Log(store), Log(store)
    writer.write(event("here", 0))
    number = store.add("log/length", 1)  # its writer is slow, or dies here
    writer.write(event("left", 2))
    assert [one.rank for one in reader.new()] == [0, 2]
    assert reader.new() == []
    store.set(f"log/{number}", json.dumps(dataclasses.asdict(event("here", 1))))
    assert [one.rank for one in reader.new()] == [1]
    assert reader.new() == []


def test_loss_of_a_connection_is_told_from_errors_of_the_rank_itself():
    assert is_communication_error(RuntimeError("[pair.cc:553] Connection closed by peer [127.0.0.1]:1"))
    assert not is_communication_error(RuntimeError("size mismatch"))
    assert not is_communication_error(ValueError("connection reset by peer"))


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("[gloo/transport/tcp/unbound_buffer.cc:129] Timed out waiting 12000ms for send operation to complete", 12),
        ("[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3, Timeout(ms)=600000) ran for 600012 "
         "milliseconds before timing out.", 600),
        ("[gloo/transport/tcp/pair.cc:1] Application timeout caused pair closure", None),
    ],
)  # fmt: skip
def test_a_timeout_of_a_collective_is_told_from_one_of_the_users(text, seconds):
    assert is_timeout(RuntimeError(text))
    assert seconds_waited(text) == seconds
    assert not is_timeout(RuntimeError("request to the reward server timed out after 30 s"))
    assert not is_timeout(RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer"))


def test_an_error_that_explains_another_is_a_consequence_too():
    try:
        with Phase(Place(), "step"):
            raise RuntimeError("gloo: connection closed by peer")
    except RuntimeError as cause:
        explained = RankError("rank 0 has lost rank 1")
        explained.__cause__ = cause
    told = of_exception(explained, kind="fell", rank=0, identity=this_process(), number=1, place=Place())
    assert told.secondary
    assert told.doing == "in step (steps done: 0)"


def test_the_line_of_the_user_who_called_the_engine_is_found_before_the_exception_gets_there():
    found = []
    code = "def call():\n try:\n  raise ValueError\n except ValueError as error:\n  found.append(line(error))"
    names = {"__name__": "polyscale.engine.stub", "line": line_of_exception, "found": found}
    exec(code, names)
    names["call"]()
    assert "in test_the_line_of_the_user_who_called" in found[0]


def test_a_wait_is_counted_from_the_last_progress_or_work():
    clock = WaitClock()
    used = 0.0

    def look(now, where="a", work=0.0, waits=True):
        nonlocal used
        used += work
        return clock.waited(where, now=now, used=used, waits=waits)

    look(100.0)
    assert [look(100.5 + half / 2, work=0.005) for half in range(4)] == [0.5, 1.0, 1.5, 2.0]
    assert look(102.5, where="b") == 0.0
    assert look(103.0, where="b") == 0.5
    assert look(103.5, where="b", work=0.1) == 0.0
    assert look(104.0, where="b", waits=False) == 0.0
    assert look(104.5, where="b") == 0.5
    assert look(204.5, where="b") == 0.0, "the process was stopped"


def test_it_is_hopeless_only_if_all_ranks_live_and_have_waited_long_in_different_places():
    def seen(beats, *waits, phases=("forward", "backward", "forward")):
        return {rank: Seen(beats, "", where=(phases[rank], "", 0), waited=wait) for rank, wait in enumerate(waits)}

    def judge(now, before):
        return hopeless(now, before, ranks=range(3), seconds=15)

    assert judge(seen(2, 15, 16, 17), seen(1, 14, 14, 14))
    assert not judge(seen(2, 15, 16, 17), {})
    assert not judge(seen(2, 15, 16, 17), seen(2, 15, 16, 17)), "no sign of life"
    assert not judge(seen(2, 15, 16, 0), seen(1, 14, 14, 14)), "one does something else"
    assert not judge(seen(2, 15, 16), seen(1, 14, 14)), "one has said nothing"
    assert not judge(seen(2, 15, 16, 17, phases=["step"] * 3), seen(1, 14, 14, 14)), "all have come to the same call"
    one = seen(3, 15.5)[0]
    assert Seen.read(one.text()) == one


def test_a_thread_waits_for_ranks_inside_torch_distributed_and_nowhere_else():
    def waits(module):
        begun, end, place = threading.Lock(), threading.Lock(), Place()
        begun.acquire(), end.acquire()
        names = {"__name__": module}
        exec("def wait(begun, end):\n begun.release()\n end.acquire()", names)
        thread = threading.Thread(target=names["wait"], args=(begun, end))
        thread.start()
        begun.acquire()
        place.thread = thread.ident
        found = place.waits_for_ranks()
        end.release()
        thread.join()
        return found

    assert waits("torch.distributed.distributed_c10d")
    assert waits("polyscale.control.agreement")
    assert not waits("torch.utils.data.dataloader")
    assert not waits("model")


@pytest.mark.parametrize("size", [1_000_000, pieces.PIECE, 9_000_000])
def test_large_values_are_shared_over_a_store_in_memory(size):
    import torch.distributed as dist

    store = dist.HashStore()
    value = {"text": "x" * size}
    with ThreadPoolExecutor(2) as threads:
        controls = [Control(store, rank, 2, timeout_s=30) for rank in range(2)]
        shared = list(threads.map(lambda control: control.share("a", [control.rank, value]), controls))
        decided = list(threads.map(lambda control: control.decide("b", value), controls))
    assert shared == [[[0, value], [1, value]]] * 2
    assert decided == [value, value]
    assert store.num_keys() == 0


HOLD_A_STORE = """
import os, sys
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.readline()
os._exit(0)
"""


def test_a_watchdog_whose_store_has_gone_is_an_error_at_once():
    import torch.distributed as dist

    from polyscale.control.watchdog import Watchdog

    command = [sys.executable, "-c", HOLD_A_STORE]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        store = dist.TCPStore("127.0.0.1", int(holder.stdout.readline()))  # connects for five minutes
        control = Control(store, 1, 2)
        store.set("anything", "")
        holder.communicate("\n", timeout=60)
    started = time.monotonic()
    with pytest.raises(RankError, match="store"):
        Watchdog(control).start()
    assert time.monotonic() - started < 10


def test_a_watchdog_of_a_world_of_one_starts_no_thread():
    import torch.distributed as dist

    from polyscale.control.watchdog import Watchdog

    before = threading.active_count()
    hook = sys.excepthook
    watchdog = Watchdog(Control(dist.HashStore(), 0, 1))
    watchdog.start()
    with watchdog.phase("forward"):
        watchdog.note("layer")
    watchdog.failed(ValueError("alone"))
    assert threading.active_count() == before
    watchdog.stop()
    assert sys.excepthook is hook
