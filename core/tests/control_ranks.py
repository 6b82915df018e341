"""The ranks of test_control_ranks.py: a program that forks those of all cases at once, after one import of torch.

Each rank gets the environment that a launcher would give; exit codes, and what each printed, are left in a folder.
"""

import atexit
import contextlib
import ctypes
import dataclasses
import datetime
import json
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path

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
    large = {f"layer.{number}": "x" * 1000 for number in range(9000)}  # more than a value of TCPStore may have
    shared = control.share("large", [rank, large])
    say("large", [shared == [[other, large] for other in range(3)], control.decide("large", large) == large])
    control.agree("large", large, what="large value")
    try:
        control.agree("large", {**large, "layer.8999": rank // 2}, what="large value")
    except RankError as error:
        say("large mismatch", str(error))
    control.share("end of part", None)
    say("keys left after large", control.store.num_keys() if rank == 0 else None)
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
def uncaught_in_a_noted_collective(control, rank):
    watchdog = started(control)
    watchdog.stepped(3)
    with watchdog.phase("backward"):
        watchdog.note("transformer.h.2 all_gather")
        if rank == 1:
            watchdog.note("transformer.h.3 reduce_scatter")
            time.sleep(1)
            fail("out of memory")
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
    watchdog = started(control, left=2.0)
    with watchdog.phase("forward"):
        if rank == 1:
            sys.exit(0)
        end = time.monotonic() + 5
        while time.monotonic() < end:
            sum(range(100_000))


@case(2)
def different_calls(control, rank):
    import torch
    import torch.distributed as dist

    watchdog = started(control, stuck=2.0)
    watchdog.stepped(5)
    with watchdog.phase("backward" if rank else "forward"):
        watchdog.note(f"layer.{rank} all_gather")
        dist.recv(torch.ones(4), src=1 - rank)


@case(2)
def different_calls_until_the_timeout(control, rank):
    import torch
    import torch.distributed as dist

    group = dist.new_group(timeout=datetime.timedelta(seconds=3))
    watchdog = started(control)
    try:
        with watchdog.phase("backward" if rank else "forward"):
            watchdog.note(f"layer.{rank} all_gather")
            dist.recv(torch.ones(4), src=1 - rank, group=group)
    except RuntimeError as error:
        watchdog.failed(error)
        explained = watchdog.explain(error)
        raise explained from error


@case(3)
def waits_for_a_rank_that_does_something_of_its_own(control, rank):
    import torch
    import torch.distributed as dist

    watchdog = started(control, stuck=1.0)
    with watchdog.phase(("forward", "backward", "step")[rank]):
        if rank == 2:
            time.sleep(6)  # as for a disk, an answer over the network, or a person at a debugger
        else:
            dist.recv(torch.ones(4), src=rank + 1)
        if rank > 0:
            dist.send(torch.ones(4), dst=rank - 1)


@case(2)
def first_rank_ends_first(control, rank):
    started(control)
    if rank == 1:
        time.sleep(5)  # the store is gone by then


@case(2)
def ends_the_group_itself(control, rank):
    import torch.distributed as dist

    with started(control).phase("forward"):
        dist.destroy_process_group()
        if rank == 1:
            os._exit(0)  # without a word
        time.sleep(4)


@case(2)
def saves_long_after_the_other_ended(control, rank):
    with started(control, left=1.0).phase("save of 'a'"):
        if rank == 0:
            time.sleep(4)


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


@case(1)
def alone(rank):
    import torch.distributed as dist

    from polyscale.control.process_group import ensure_process_group
    from polyscale.errors import PolyscaleError
    from polyscale.topology import Topology

    def refusal():
        try:
            ensure_process_group(Gloo(), Cpu())
        except PolyscaleError as error:
            return f"{type(error).__name__}: {error}"

    os.environ.update({"WORLD_SIZE": "2", "RANK": "0", "LOCAL_WORLD_SIZE": "2", "POLYSCALE_TIMEOUT": "1"})
    say("no one comes", refusal())
    os.environ["RANK"] = "5"
    say("rank too high", refusal())
    del os.environ["MASTER_ADDR"]
    say("no address", refusal())
    del os.environ["WORLD_SIZE"], os.environ["RANK"]
    control = ensure_process_group(Gloo(), Cpu())
    say("same", control is ensure_process_group(Gloo(), Cpu()))
    control.agree("config", {"lr": 1}, what="configuration")
    say("alone", [control.share("a", 1), control.decide("b", 2), str(Topology.build()), dist.get_world_size()])
    dist.destroy_process_group()
    say("new group, new control", ensure_process_group(Gloo(), Cpu()) is not control)


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


@case(4)
def remade_default_group(control, rank):
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    from polyscale.errors import RankError
    from polyscale.topology import Topology

    def sums(mesh):
        whole = distribute_tensor(torch.arange(4.0), mesh, [Replicate(), Shard(0)])
        return (whole * 2).full_tensor().tolist()

    first, twin = Topology.build(dp_replicate=2), Topology.build(dp_replicate=2)
    say("shared", [first.dense is twin.dense, first.group("grad") is twin.group("grad")])
    say("before", sums(first.data_mesh()))
    twin.close()
    say("other closed", sums(first.data_mesh()))
    ports = control.share("port", free_port())
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{ports[0]}", rank=rank, world_size=4)
    dist.new_group([0, 1]), dist.new_group([2, 3])  # names of groups begin anew, and now mean others
    try:
        first.group("grad")
    except RankError as error:
        say("stale", str(error))
    first.close()
    again = Topology.build(dp_replicate=2)
    say("after", sums(again.data_mesh()))
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

    arguments = (rank,) if name == "alone" else (ensure_process_group(Gloo(), Cpu()), rank)
    try:
        CASES[name][0](*arguments)
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
    import torch.distributed.tensor

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
