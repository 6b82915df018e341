"""What the watch makes of a store that is slow, broken or gone, and of a start that fails; without ranks."""

import dataclasses
import hashlib
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from polyscale.control import processes, watch
from polyscale.control.agreement import Control, has_timed_out, second_connection
from polyscale.control.events import Event, Log
from polyscale.control.rounds import Rounds
from polyscale.control.watchdog import Timings, Watchdog
from polyscale.errors import RankError

PATIENT = Timings(poll=0.01, beat=0.01, grace=1000.0)


class Wrapped:
    """A store in memory with requests of its own; c10d's requests are methods, so they can be replaced by name."""

    def __init__(self, **requests):
        self._store = dist.HashStore()
        self._requests = requests

    def __getattr__(self, name):
        if name == "clone":
            raise AttributeError(name)
        request = self._requests.get(name)
        real = getattr(self._store, name)
        return real if request is None else lambda *arguments: request(real, *arguments)


def time_out():
    store = dist.HashStore()
    store.set_timeout(timedelta(milliseconds=1))
    store.get("never set")


def here(rank, **fields):
    return Event("here", rank, **{**dataclasses.asdict(processes.this_process()), **fields})


def come(store, **fields):
    """What rank 0 does at its start."""
    Log(store).write(here(0, **fields))
    Control(store, 0, 2).introduce(dataclasses.asdict(here(0, **fields)), what="initialize")


class HeldStore:
    """A store that ends when it is told to, as with the process that holds it; and a connection to it."""

    def __init__(self):
        self._holder = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.connection = dist.TCPStore("127.0.0.1", self._holder.port)

    def end(self):
        self._holder = None


def until(true):
    end = time.monotonic() + 30
    while not true() and time.monotonic() < end:
        time.sleep(0.01)
    assert true()


def test_a_connection_outlives_a_time_out_and_nothing_outlives_a_connection():
    held = HeldStore()
    twin = second_connection(dist.PrefixStore("a", held.connection))
    twin.set_timeout(timedelta(milliseconds=10))
    for request in (lambda: twin.get("b"), lambda: twin.wait(["b"]), lambda: twin.multi_get(["b"])):
        with pytest.raises(RuntimeError) as caught:
            request()
        assert has_timed_out(caught.value)
        assert twin.add("c", 1) > 0
    held.end()
    for request in (lambda: twin.check(["c"]), lambda: twin.get("c"), lambda: twin.add("c", 1)):
        with pytest.raises(RuntimeError) as caught:
            request()
        assert not has_timed_out(caught.value)


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_time_outs_of_other_stores_are_told_from_their_end(kind, tmp_path):
    store = dist.HashStore() if kind == "memory" else dist.FileStore(str(tmp_path / "folder"), 2)
    store.set_timeout(timedelta(milliseconds=10))
    with pytest.raises(RuntimeError) as caught:
        store.get("never set")
    assert has_timed_out(caught.value)
    assert not has_timed_out(dist.DistNetworkError("Connection timed out"))
    assert not has_timed_out(RuntimeError("ready or not_ready response expected"))


def test_a_look_that_times_out_is_not_the_end_of_the_store():
    slow = [True] * 5

    def get(real, key):
        if slow and key.startswith("log/"):
            slow.pop()
            time_out()
        return real(key)

    store = Wrapped(get=get)
    control = Control(store, 1, 2)
    watch = Watchdog(control, PATIENT)._watch
    Log(store).write(here(2))
    come(store)
    stop = threading.Event()
    thread = threading.Thread(target=Rounds(watch, store, stop).run, daemon=True)
    thread.start()
    until(lambda: watch.store_ended or watch.peers.knows(0))
    stop.set()
    thread.join()
    assert not watch.store_ended
    assert sorted(watch.peers.here) == [0, 2]
    assert watch.peers.failures == []


def test_records_that_were_read_before_a_time_out_are_not_lost():
    broken = [True]

    def get(real, key):
        if key == "log/2" and broken:
            broken.pop()
            time_out()
        return real(key)

    log = Log(Wrapped(get=get))
    log.write(here(1)), log.write(here(2))
    with pytest.raises(RuntimeError):
        log.new()
    assert [event.rank for event in log.new()] == [1, 2]


def test_a_request_that_takes_too_long_is_not_said_to_be_the_end_of_the_store():
    with pytest.raises(RankError, match=r"It did not answer in time \(Wait timeout\)"):
        Control(dist.HashStore(), 0, 2).call(time_out)


@pytest.mark.parametrize("alive", [True, False])
def test_rank_0_is_known_from_the_start_so_its_end_is_told_from_that_of_a_store(alive):
    """The store ends before the thread has looked for the first time, whoever holds it."""
    held = HeldStore()
    come(held.connection, **({} if alive else {"started": "1"}))
    watchdog = Watchdog(Control(held.connection, 1, 2), dataclasses.replace(PATIENT, poll=1.0))
    watchdog.start()
    watch = watchdog._watch
    held.end()
    until(lambda: watch.store_ended and watch.peers.knows(0))
    watchdog.stop()
    assert [event.kind for event in watch.peers.failures] == ([] if alive else ["gone"])


def test_nobody_is_judged_while_rank_0_has_not_come():
    held = HeldStore()
    watchdog = Watchdog(Control(held.connection, 1, 2), PATIENT)
    with ThreadPoolExecutor(1) as threads:
        started = threads.submit(watchdog.start)
        until(lambda: held.connection.check(["beat/1"]))  # it watches while it waits
        held.end()
        with pytest.raises(RankError, match="cannot reach the store"):
            started.result(timeout=30)
    assert watchdog._watch.peers.failures == []
    assert watchdog._watch._users == 0


def test_a_start_without_rank_0_can_be_tried_again_and_leaves_nothing_behind():
    store = dist.HashStore()
    control = Control(store, 1, 2, timeout_s=0.1)
    watchdog = Watchdog(control, PATIENT)
    threads, hook = threading.active_count(), sys.excepthook
    with pytest.raises(RankError, match="rank 0 of 2 did not come"):
        watchdog.start()
    assert (threading.active_count(), sys.excepthook) == (threads, hook)
    assert [event.kind for event in Log(store).new()] == ["here", "left"]
    watchdog.stop()  # it has not started
    come(store)
    watchdog.start()
    assert threading.active_count() == threads + 1
    watchdog.stop()
    assert (threading.active_count(), sys.excepthook) == (threads, hook)


def test_a_start_whose_thread_does_not_begin_can_be_tried_again(monkeypatch):
    store = dist.HashStore()
    come(store)
    first, second = (Watchdog(control, PATIENT) for control in [Control(store, 1, 2)] for _ in range(2))

    def no_thread(self):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", no_thread)
        for watchdog in (first, second):
            with pytest.raises(RuntimeError, match="new thread"):
                watchdog.start()
    threads = threading.active_count()
    first.start()
    assert threading.active_count() == threads + 1
    first.stop()
    assert threading.active_count() == threads
    assert [event.kind for event in Log(store).new() if event.rank == 1] == ["here", "left"] * 3


def test_a_start_whose_connection_fails_says_that_the_rank_has_left(monkeypatch):
    store = dist.HashStore()

    def refused(store):
        raise dist.DistNetworkError("connection refused")

    monkeypatch.setattr(watch, "second_connection", refused)
    with pytest.raises(RankError, match="cannot reach the store"):
        Watchdog(Control(store, 1, 2), PATIENT).start()
    assert [event.kind for event in Log(store).new()] == ["here", "left"]


@pytest.mark.parametrize("call", ["share", "decide"])
def test_rank_0_may_end_with_the_store_as_soon_as_the_last_verdict_is_cleared(call):
    ended = []

    def delete_key(real, key):
        if ended:
            raise dist.DistNetworkError("Failed to recv, got 0 bytes")
        ended.extend([True] if key.endswith("/verdict") else [])
        return real(key)

    store = Wrapped(delete_key=delete_key)
    with ThreadPoolExecutor(2) as threads:
        controls = [Control(store, rank, 2, timeout_s=30) for rank in range(2)]
        assert len(list(threads.map(lambda control: getattr(control, call)("name", "value"), controls))) == 2
    assert ended
    assert store.num_keys() == 0


def rounds_of(rank, *peers, place="host 0"):
    """Rounds of ``rank`` that looks when it is told to, and its store."""
    store = dist.HashStore()
    watch = Watchdog(Control(store, rank, 1 + len(peers)), PATIENT)._watch
    rounds = Rounds(watch, store, threading.Event())
    rounds._here = dataclasses.replace(rounds._here, place=place)
    watch.peers.take(peers)
    return rounds, watch, store


@pytest.mark.parametrize(("seconds", "held_up"), [(1.0, False), (300.0, True)])
def test_a_host_is_silent_only_if_it_was_listened_to_in_time(monkeypatch, seconds, held_up):
    monkeypatch.setenv("POLYSCALE_HEARTBEAT", "60")
    rounds, watch, store = rounds_of(0, here(1, place="host 1"))
    store.set("beat/1", "the same")
    now = 1000.0
    for _ in range(65):
        rounds._listen(now)
        now += 1.0
    assert [event.kind for event in watch.peers.failures] == ["silent"]
    rounds, watch, store = rounds_of(0, here(1, place="host 1"))
    store.set("beat/1", "the same")
    for step in (1.0, 1.0, seconds, 1.0):  # the process was stopped, or waited for the store
        rounds._listen(now)
        now += step
    assert watch.peers.failures == [], held_up


def test_time_in_which_the_process_was_stopped_does_not_count_as_waiting_for_a_rank_that_left(monkeypatch):
    monkeypatch.setattr(processes, "computes", lambda *, but: False)  # that of the test run may at any moment
    rounds, watch, _ = rounds_of(0, here(1))
    watch.peers.take([Event("left", 1)])
    watch.place.phase = "forward"
    assert not rounds._waits_too_long(1000.0)
    assert not rounds._waits_too_long(1300.0)
    looks = [rounds._waits_too_long(1300.0 + seconds) for seconds in range(1, 12)]
    assert looks == [False] * 9 + [True] * 2


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="states of threads are read from /proc")
def test_a_rank_that_gets_no_processor_does_not_wait_for_one_that_left(monkeypatch):
    rounds, watch, _ = rounds_of(0, here(1))
    watch.peers.take([Event("left", 1)])
    watch.place.phase = "forward"
    monkeypatch.setattr(time, "process_time", lambda: 1.0)  # as where many others compute
    ended = threading.Event()

    def compute():
        while not ended.is_set():
            hashlib.pbkdf2_hmac("sha256", b"", b"", 1_000_000)  # without the interpreter's lock

    with ThreadPoolExecutor(1) as threads:
        threads.submit(compute)
        until(lambda: processes.computes(but=threading.get_native_id()))
        assert not any(rounds._waits_too_long(1000.0 + seconds) for seconds in range(20))
        ended.set()
    monkeypatch.setattr(processes, "computes", lambda *, but: False)  # threads of the test run may at any moment
    assert rounds._waits_too_long(1019.0 + 4) is False
    assert any(rounds._waits_too_long(1023.0 + seconds) for seconds in range(1, 20))
