"""The ranks of test_control_ranks.py: a program that forks those of all cases at once, after importing torch once.

Each rank gets the environment that a launcher would give; exit codes, and what each printed, are left in a folder.
What ranks do is in the other files of this folder, by subject.
"""

import atexit
import contextlib
import ctypes
import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

import agreeing  # noqa: F401 - it registers its cases, like those below
import ending  # noqa: F401
import failing  # noqa: F401
import grouping  # noqa: F401
import waiting  # noqa: F401
from cases import CASES, LIMIT_S, Cpu, Gloo, free_ports, say


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

    # Once for all: ranks begin sooner, and with the same code if somebody edits it in the meantime.
    import polyscale.control.process_group
    import polyscale.control.watchdog
    import polyscale.topology  # noqa: F401

    torch.set_num_threads(1)
    begun = time.monotonic()
    running, results = {}, {}
    ports = free_ports(len(names))
    for name in names:
        _, world, environment = CASES[name]
        port = ports.pop()
        for rank in range(world):
            pid = os.fork()
            if pid == 0:
                be_rank(name, rank, world, port, environment, folder)
                if name == "calm":
                    return  # ends as any script does
                end_at_once(0)
            running[pid] = (name, rank)
    end = time.monotonic() + LIMIT_S - 5  # from now: where much else runs, it takes long until all have begun
    while running and time.monotonic() < end:
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
