"""Ranks that agree, fail and die: real processes, one after an import of torch that they share by fork.

This file is also the program: it forks the ranks of all cases at once, each with the environment that a launcher
would give, and reports exit codes and what they printed.
"""

import atexit
import contextlib
import ctypes
import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

CASES = {}
LIMIT_S = 90.0


def case(world, **environment):
    """Register a function of (watchdog, control, rank) as what each rank of a case does."""

    def register(function):
        CASES[function.__name__] = (function, world, environment)
        return function

    return register


class Gloo:
    def backend(self, device_type):
        return "gloo"


class Cpu:
    device_type = "cpu"


# What ranks do.


@case(3)
def agreement(control, rank):
    from polyscale.errors import RankError

    for number in range(3):
        control.agree("same", {"step": number}, what="step")
    say("shared", control.share("who", {"rank": rank}))
    say("decided", control.decide("tag", f"tag of {rank}"))
    for _ in range(2):  # the same name again must not read the old verdict
        try:
            control.agree("config", {"lr": 0.1, "seed": rank // 2}, what="configuration")
        except RankError as error:
            say("mismatch", str(error))
        control.agree("config", {"lr": 0.1}, what="configuration")
    control.share("end of part", None)
    say("keys left", control.store.num_keys() if rank == 0 else None)
    control.timeout_s, patience = 1.5, control.timeout_s
    if rank == 2:
        time.sleep(4)
    try:
        control.agree("save", "a", what="save of tag 'a'")
    except RankError as error:
        say("missing", str(error))
    control.timeout_s = patience
    control.share("all again", rank)


@case(2)
def calm(control, rank):
    from polyscale.control.watchdog import Watchdog

    first, second = Watchdog(control), Watchdog(control)
    hook = sys.excepthook
    first.start(), second.start(), second.start()
    say("threads", watch_threads())
    if os.fork() == 0:  # as a worker of a data loader; what runs at its exit must not say that the rank left
        atexit._run_exitfuncs()
        os._exit(0)
    os.wait()
    for step in range(3):
        with first.phase("forward"):
            first.note("block.0")
            control.share("loss", step)
        first.stepped(step)
    time.sleep(1.2)
    first.stop()
    say("threads after one stop", watch_threads())
    second.stop(), second.stop()
    say("threads after both", watch_threads())
    say("hook restored", sys.excepthook is hook)
    second.start()
    control.share("end", None)


@case(2)
def killed(control, rank):
    with started(control).phase("forward"):
        if rank == 1:
            time.sleep(1)
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(LIMIT_S)


@case(2)
def first_rank_killed(control, rank):
    with started(control).phase("forward"):
        if rank == 0:  # and the store with it
            time.sleep(1)
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(LIMIT_S)


@case(2)
def killed_in_collective(control, rank):
    import torch
    import torch.distributed as dist

    watchdog = started(control)
    with watchdog.phase("backward"):
        watchdog.note("block.3 all_reduce")
        if rank == 1:
            time.sleep(1)
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            dist.all_reduce(torch.ones(4))
        except RuntimeError as error:
            watchdog.failed(error)
            raise


@case(2)
def caught_on_one_rank(control, rank):
    import torch
    import torch.distributed as dist

    watchdog = started(control)
    if rank == 1:
        try:
            with watchdog.phase("forward"):
                watchdog.note("encoder.block.2")
                fail("sizes do not match")
        except ValueError as error:
            watchdog.failed(error)
            time.sleep(8)  # alive, its connections open, and of no use to the others
    with watchdog.phase("step"):
        dist.all_reduce(torch.ones(4))


@case(2)
def uncaught_on_one_rank(control, rank):
    with started(control).phase("forward"):
        if rank == 1:
            time.sleep(1)
            fail("nobody catches this")
        time.sleep(LIMIT_S)


@case(2)
def uncaught_on_both(control, rank):
    with started(control).phase("forward"):
        time.sleep(rank)
        fail("the same on both")


@case(2)
def caught_on_both(control, rank):
    watchdog = started(control)
    for number in range(2):
        try:
            with watchdog.phase("forward"):
                time.sleep(rank * 0.8)
                fail(f"number {number}")
        except ValueError as error:
            watchdog.failed(error)
            watchdog.failed(error)
    time.sleep(3.5)
    say("went on", control.share("after", rank))


@case(2)
def ended_early(control, rank):
    watchdog = started(control, left=2.0)
    watchdog.stepped(7)
    with watchdog.phase("backward"):
        if rank == 1:
            sys.exit(0)
        time.sleep(LIMIT_S)


@case(2)
def ended_early_while_the_other_computes(control, rank):
    watchdog = started(control, left=1.0)
    with watchdog.phase("forward"):
        if rank == 1:
            sys.exit(0)
        end = time.monotonic() + 4
        while time.monotonic() < end:
            sum(range(100_000))


@case(2)
def first_rank_ends_first(control, rank):
    started(control)
    if rank == 1:
        time.sleep(5)  # the store is gone by then


@case(2, POLYSCALE_HEARTBEAT="1")
def holds_the_lock(control, rank):
    started(control)
    if rank == 1:
        ctypes.PyDLL(None).usleep(5_000_000)  # PyDLL keeps the interpreter's lock
    control.share("end", rank)


@case(2, POLYSCALE_HEARTBEAT="2")
def silent_host(control, rank):
    from polyscale.control import processes

    identity = dataclasses.replace(processes.this_process(), host=f"host{rank}", place=f"host{rank}")
    processes.this_process = lambda: identity
    with started(control).phase("forward"):
        time.sleep(1)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(LIMIT_S)


@case(2)
def hostname_does_not_resolve(control, rank):
    import torch
    import torch.distributed as dist

    total = torch.ones(1)
    dist.all_reduce(total)
    say("sum", [total.item(), socket.gethostname()])


@case(4)
def topology(control, rank):
    import torch
    import torch.distributed as dist

    from polyscale.topology import Topology

    def members(group):
        return dist.get_process_group_ranks(group)

    hybrid = Topology.build(dp_replicate=2)
    say("hybrid", [str(hybrid), members(hybrid.mesh("dp_shard").get_group()), members(hybrid.group("grad"))])
    say("hybrid mesh", hybrid.mesh("dp_replicate", "dp_shard").mesh.tolist())
    mixed = Topology.build(dp_shard=2, tp=2, ep=2)
    groups = {name: members(mixed.group(name)) for name in ("batch", "grad", "expert_grad", "norm")}
    say("mixed", {**groups, "tp": members(mixed.mesh("tp").get_group()), "ep": members(mixed.mesh("ep").get_group())})
    say("dp", [mixed.dp_rank, mixed.dp_size, mixed.coordinate("tp"), mixed.size("edp")])
    three = Topology.build(dp_replicate=2, dp_shard=1, sp=2)
    say("three", [members(three.group("grad")), members(three.group("batch")), three.group("norm") is dist.group.WORLD])
    spanning = Topology.build(pp=2, dp_replicate=2, dp_shard=1)
    say("pipeline", [members(spanning.group("grad")), members(spanning.mesh("pp").get_group())])
    total = torch.tensor(float(rank))
    dist.all_reduce(total, group=mixed.group("batch"))
    say("sum", total.item())
    control_group = hybrid.group("control")
    say("control", [dist.get_backend(control_group), control_group is hybrid.group("control")])
    for one in (hybrid, mixed, three, spanning):
        one.close()
    try:
        dist.get_process_group_ranks(control_group)
    except Exception as error:
        say("closed group", str(error))
    dist.barrier()


# What ranks need.


def say(key, value):
    print(json.dumps([key, value]), flush=True)


def fail(message):
    raise ValueError(message)


def started(control, **timings):
    from polyscale.control.watchdog import Timings, Watchdog

    watchdog = Watchdog(control, Timings(**timings))
    watchdog.start()
    control.share("started", None)
    return watchdog


def watch_threads():
    return sum(thread.name == "polyscale-watchdog" for thread in threading.enumerate())


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def take_a_strange_name():
    new_user, new_uts = 0x10000000, 0x04000000
    flags = new_uts if os.geteuid() == 0 else new_uts | new_user
    if ctypes.CDLL(None, use_errno=True).unshare(flags) != 0:
        return False
    with contextlib.suppress(OSError):
        socket.sethostname("no-such-host.invalid")
    return socket.gethostname() == "no-such-host.invalid"


def be_rank(name, rank, world, port, environment, folder):
    for number, suffix in ((1, "out"), (2, "err")):
        file = os.open(folder / f"{name}.{rank}.{suffix}", os.O_CREAT | os.O_WRONLY)
        os.dup2(file, number)
    own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    os.environ.update({key: str(value) for key, value in own.items()})
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "POLYSCALE_TIMEOUT": "30", **environment})
    if name == "hostname_does_not_resolve" and not take_a_strange_name():
        say("skip", "this system does not let a process have a host name of its own")
    from polyscale.control.process_group import ensure_process_group

    control = ensure_process_group(Gloo(), Cpu())
    try:
        CASES[name][0](control, rank)
    except SystemExit as end:
        end_at_once(end.code)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        end_at_once(1)


def end_at_once(code):
    """Do what a script does at its end, but for taking the interpreter apart, which costs a second after torch."""
    atexit._run_exitfuncs()
    sys.stdout.flush(), sys.stderr.flush()
    os._exit(code)


def main(folder, names):
    import torch
    import torch.distributed
    import torch.distributed.device_mesh

    torch.set_num_threads(1)
    begun = time.monotonic()
    running, results = {}, {}
    for name in names:
        _, world, environment = CASES[name]
        port = free_port()
        for rank in range(world):
            pid = os.fork()
            if pid == 0:
                be_rank(name, rank, world, port, environment, folder)
                if name == "calm":
                    return  # ends as any script does
                end_at_once(0)
            running[pid] = (name, rank)
    while running and time.monotonic() - begun < LIMIT_S - 5:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            name, rank = running.pop(pid)
            results[f"{name}.{rank}"] = [os.waitstatus_to_exitcode(status), time.monotonic() - begun]
            if name == "silent_host" and rank == 0:
                for other in [other for other, who in running.items() if who == ("silent_host", 1)]:
                    os.kill(other, signal.SIGKILL)
        else:
            time.sleep(0.05)
    for pid, (name, rank) in running.items():
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        results[f"{name}.{rank}"] = ["hung", time.monotonic() - begun]
    (folder / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:] or list(CASES))


# What is expected of them.


class Ranks:
    def __init__(self, folder):
        self.folder = folder
        self.results = json.loads((folder / "results.json").read_text())

    def code(self, name, rank):
        return self.results[f"{name}.{rank}"][0]

    def codes(self, name):
        return [self.code(name, rank) for rank in range(CASES[name][1])]

    def errors(self, name, rank):
        return (self.folder / f"{name}.{rank}.err").read_text()

    def said(self, name, rank, key):
        lines = (self.folder / f"{name}.{rank}.out").read_text().splitlines()
        return [value for said, value in map(json.loads, lines) if said == key]


pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, __file__, str(folder)], check=True, env=environment, timeout=2 * LIMIT_S)
    return Ranks(folder)


def test_ranks_that_give_equal_values_agree_and_see_every_value(ranks):
    assert ranks.codes("agreement") == [0, 0, 0]
    for rank in range(3):
        assert ranks.said("agreement", rank, "shared") == [[{"rank": 0}, {"rank": 1}, {"rank": 2}]]
        assert ranks.said("agreement", rank, "decided") == ["tag of 0"]


def test_a_different_value_is_an_error_on_every_rank_with_both_values(ranks):
    for rank in range(3):
        first, second = ranks.said("agreement", rank, "mismatch")
        assert first == second
        assert "configuration['seed'] differs" in first
        assert "rank 0 has 0, rank 2 has 1" in first


def test_a_rank_that_does_not_come_is_named_on_every_rank(ranks):
    for rank in range(3):
        (message,) = ranks.said("agreement", rank, "missing")
        assert "save of tag 'a'" in message
        assert "rank 2 of 3 did not come within 1.5 s" in message
        assert "POLYSCALE_TIMEOUT" in message


def test_agreements_leave_few_keys_in_the_store(ranks):
    (left,) = ranks.said("agreement", 0, "keys left")
    assert left < 20


def test_a_run_without_failures_says_nothing_and_leaves_no_thread(ranks):
    assert ranks.codes("calm") == [0, 0]
    for rank in range(2):
        assert ranks.errors("calm", rank) == ""
        assert ranks.said("calm", rank, "threads") == [1]
        assert ranks.said("calm", rank, "threads after one stop") == [1]
        assert ranks.said("calm", rank, "threads after both") == [0]
        assert ranks.said("calm", rank, "hook restored") == [True]


@pytest.mark.parametrize(("name", "dead"), [("killed", 1), ("first_rank_killed", 0)])
def test_a_killed_rank_ends_the_others_within_ten_seconds(ranks, name, dead):
    assert ranks.code(name, dead) == -signal.SIGKILL
    assert ranks.code(name, 1 - dead) == 75
    assert ranks.results[f"{name}.{1 - dead}"][1] - ranks.results[f"{name}.{dead}"][1] < 10
    message = ranks.errors(name, 1 - dead)
    assert f"rank {dead} (pid " in message
    assert "was killed" in message
    assert "this rank was in forward (steps done: 0) at" in message
    assert "test_control_ranks.py:" in message
    assert f"in {name} (module __main__)" in message


def test_a_rank_in_a_collective_with_a_killed_one_names_it(ranks):
    assert ranks.codes("killed_in_collective") == [1, -signal.SIGKILL]
    message = ranks.errors("killed_in_collective", 0)
    assert "rank 0 has lost rank 1 while it was in backward, block.3 all_reduce (steps done: 0)" in message
    assert "was killed or ended at once" in message


def test_a_failure_that_one_rank_catches_ends_the_others_with_who_where_and_what(ranks):
    assert ranks.code("caught_on_one_rank", 0) == 75
    message = ranks.errors("caught_on_one_rank", 0)
    assert "raised ValueError: sizes do not match at" in message
    assert "test_control_ranks.py" in message
    assert "in fail (module __main__), while in forward, encoder.block.2 (steps done: 0)" in message
    assert "this rank was in step" in message
    assert ranks.code("caught_on_one_rank", 1) != 0


def test_an_uncaught_exception_ends_the_other_rank_too(ranks):
    assert ranks.codes("uncaught_on_one_rank") == [75, 1]
    assert "raised ValueError: nobody catches this" in ranks.errors("uncaught_on_one_rank", 0)
    assert "Traceback" in ranks.errors("uncaught_on_one_rank", 1)


def test_ranks_that_fail_alike_keep_their_own_exception(ranks):
    assert ranks.codes("uncaught_on_both") == [1, 1]
    for rank in range(2):
        assert "ValueError: the same on both" in ranks.errors("uncaught_on_both", rank)
        assert "polyscale:" not in ranks.errors("uncaught_on_both", rank)


def test_ranks_that_catch_the_same_failures_go_on(ranks):
    assert ranks.codes("caught_on_both") == [0, 0]
    assert ranks.said("caught_on_both", 0, "went on") == [[0, 1]]


def test_a_rank_that_ends_early_ends_one_that_waits_in_a_phase(ranks):
    assert ranks.codes("ended_early") == [75, 0]
    assert "rank 1 (pid" in ranks.errors("ended_early", 0)
    assert "has ended in order (steps done: 7)" in ranks.errors("ended_early", 0)


@pytest.mark.parametrize("name", ["ended_early_while_the_other_computes", "first_rank_ends_first", "holds_the_lock"])
def test_a_rank_is_not_ended_for_what_is_in_order(ranks, name):
    assert ranks.codes(name) == [0, 0]
    assert ranks.errors(name, 0) + ranks.errors(name, 1) == ""


def test_a_silent_host_is_noticed(ranks):
    assert ranks.code("silent_host", 0) == 75
    assert "gives no sign of life" in ranks.errors("silent_host", 0)
    assert "on host1" in ranks.errors("silent_host", 0)


def test_ranks_meet_on_a_host_whose_name_does_not_resolve(ranks):
    skipped = ranks.said("hostname_does_not_resolve", 0, "skip")
    if skipped:
        pytest.skip(skipped[0])
    assert ranks.codes("hostname_does_not_resolve") == [0, 0]
    assert ranks.said("hostname_does_not_resolve", 1, "sum") == [[2.0, "no-such-host.invalid"]]
    assert ranks.errors("hostname_does_not_resolve", 1) == ""


def test_topology_groups_hold_the_ranks_of_their_purpose(ranks):
    assert ranks.codes("topology") == [0, 0, 0, 0]
    assert ranks.said("topology", 3, "hybrid") == [
        ["rank 3 of 4: dp_replicate 2 (1), dp_shard 2 (1)", [2, 3], [0, 1, 2, 3]]
    ]
    assert ranks.said("topology", 0, "hybrid mesh") == [[[0, 1], [2, 3]]]
    assert ranks.said("topology", 3, "mixed") == [
        {"batch": [1, 3], "grad": [1, 3], "expert_grad": [1, 3], "norm": [0, 1, 2, 3], "tp": [2, 3], "ep": [2, 3]}
    ]
    assert ranks.said("topology", 3, "dp") == [[1, 2, 1, 2]]
    assert ranks.said("topology", 1, "three") == [[[0, 1, 2, 3], [1, 3], True]]
    assert ranks.said("topology", 2, "pipeline") == [[[2, 3], [0, 2]]]
    assert [ranks.said("topology", rank, "sum") for rank in range(4)] == [[2.0], [4.0], [2.0], [4.0]]
    assert ranks.said("topology", 0, "control") == [["gloo", True]]
    assert ranks.said("topology", 0, "closed group")
