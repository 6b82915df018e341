"""What the cases of ranks share: their register, and what ranks say and need."""

import contextlib
import json
import os
import socket

CASES = {}
LIMIT_S = 90.0
PIPE = os.pipe()  # between the two ranks of the case that uses it


def case(world, **environment):
    """Register a function of (control, rank) as what each rank of a case does."""

    def register(function):
        CASES[function.__name__] = (function, world, environment)
        return function

    return register


class Gloo:
    name = "gloo"

    def backend(self, device_type):
        return "gloo"


class Cpu:
    name = "cpu"
    device_type = "cpu"


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


def free_ports(count):
    """Ports that differ: each is held until all are found.

    They are none of those that a system hands out by itself. It does so for every connection that another rank makes,
    and for every one that gloo accepts, until the rank that is to listen has come to that.
    """
    first, last = 10_000, 32_000
    start = os.getpid() * 64 % (last - first)  # other programs like this one begin elsewhere
    found = []
    with contextlib.ExitStack() as probes:
        for number in range(last - first):
            probe = probes.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                probe.bind(("127.0.0.1", first + (start + number) % (last - first)))
                found.append(probe.getsockname()[1])
            if len(found) == count:
                break
    return found
